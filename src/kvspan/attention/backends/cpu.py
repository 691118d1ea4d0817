"""The native kernels of `csrc/`, behind the contract: one call for all sequences of a step.

Knows addresses and strides. Which instruction set runs is `native.native_path`'s to say.
"""

import torch
from torch import Tensor

from kvspan.attention.contract import Cached, Capabilities, KeyIndex
from kvspan.attention.scaled import Scaled
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
            torch.int8: native.Dtype.i8,
            torch.float8_e4m3fn: native.Dtype.e4m3,
        }

    def __call__(
        self, query: Tensor, keys: Cached, values: Cached, index: KeyIndex, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See `contract.Kernel`."""
        rows, heads, head_dim = query.shape
        key_elements, key_scales, (first_part, *_) = _parts_of(keys)
        value_elements, value_scales, _ = _parts_of(values)
        assert key_elements.dtype == value_elements.dtype, "keys and values are stored alike"
        assert isinstance(keys, Scaled) or keys.dtype == query.dtype, "wider elements are not converted"
        _, kv_heads, block_size, value_dim = value_elements.shape
        out = query.new_empty(rows, heads, value_dim)
        lse = query.new_empty(rows, heads, dtype=torch.float32)
        flat = index.flat
        if query.stride(2) != 1:
            query = query.contiguous()
        self._attend(
            self._isa,
            self._dtypes[query.dtype],
            self._dtypes[key_elements.dtype],
            torch.get_num_threads(),
            scale,
            query.data_ptr(),
            *query.stride()[:2],
            *_place(key_elements),
            *_place(key_scales),
            *_place(value_elements),
            *_place(value_scales),
            heads,
            kv_heads,
            head_dim,
            value_dim,
            block_size,
            first_part,
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


def _parts_of(cached: Cached) -> tuple[Tensor, Tensor | None, tuple[int, ...]]:
    """Elements, their scales if they have any, and how many of them share one."""
    if isinstance(cached, Scaled):
        return cached.codes, cached.scales, cached.parts
    return cached, None, (cached.shape[-1],)


def _place(blocks: Tensor | None) -> tuple[int, int, int, int]:
    """Address, and strides of blocks, heads and slots; elements of a slot are neighbours."""
    if blocks is None:
        return 0, 0, 0, 0
    block, head, slot, _ = blocks.stride()
    return blocks.data_ptr(), block, head, slot
