"""The native kernels of `csrc/`, behind the contract: one call for all sequences of a step.

Knows addresses and strides. Which instruction set runs is `native.native_path`'s to say.
"""

import torch
from torch import Tensor

from kvspan.attention.contract import Capabilities, KeyIndex
from kvspan.native import NativePath, extension, native_path


class NativeKernel:
    """Paged attention in C++.

    Args:
        path: which kernels run.
    """

    def __init__(self, path: NativePath | None = None) -> None:
        path = path or native_path()
        self.capabilities = Capabilities(
            devices=("cpu",),
            dtypes=(torch.float32, torch.bfloat16, torch.float16),
            dim_multiple=8,
            absent="" if path.isa else path.why,
        )
        if path.isa is None:
            return
        native = extension()
        self._attend, self._isa = native.attend, native.Isa[path.isa]
        self._dtypes = {
            torch.float32: native.Dtype.f32,
            torch.bfloat16: native.Dtype.bf16,
            torch.float16: native.Dtype.f16,
        }

    def __call__(
        self, query: Tensor, keys: Tensor, values: Tensor, index: KeyIndex, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See `contract.Kernel`."""
        assert query.dtype == keys.dtype == values.dtype, "the native kernels read one dtype"
        rows, heads, head_dim = query.shape
        _, kv_heads, block_size, value_dim = values.shape
        out = query.new_empty(rows, heads, value_dim)
        lse = query.new_empty(rows, heads, dtype=torch.float32)
        flat = index.flat
        if query.stride(2) != 1:
            query = query.contiguous()
        self._attend(
            self._isa,
            self._dtypes[keys.dtype],
            torch.get_num_threads(),
            scale,
            query.data_ptr(),
            *query.stride()[:2],
            keys.data_ptr(),
            *keys.stride()[:3],
            values.data_ptr(),
            *values.stride()[:3],
            heads,
            kv_heads,
            head_dim,
            value_dim,
            block_size,
            len(flat.row_starts) - 1,
            flat.row_starts.data_ptr(),
            flat.table_starts.data_ptr(),
            flat.blocks.data_ptr(),
            flat.first.data_ptr(),
            flat.last.data_ptr(),
            out.data_ptr(),
            lse.data_ptr(),
        )
        return out, lse
