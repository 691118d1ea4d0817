"""The native kernels of `csrc/`, behind the contract: one call for all sequences of a step.

Knows addresses and strides. Which instruction set runs is decided once, by `native_path`.
"""

import importlib
import logging
from dataclasses import dataclass
from functools import cache
from types import ModuleType

import torch
from torch import Tensor

from kvspan.attention.contract import Capabilities, KeyIndex
from kvspan.config.environment import CPU_ISA, CPU_ISAS, asked_cpu_isa
from kvspan.errors import ConfigError

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class NativePath:
    """Which native kernels run in this process.

    Args:
        isa: their instruction set; None = there are none.
        why: the reason, as a sentence's end.
    """

    isa: str | None
    why: str


@cache
def native_path() -> NativePath:
    """The instruction set that the environment forces, or else the best one of build and processor.

    Raises:
        ConfigError: the one that is forced is not to be had here.
    """
    asked = asked_cpu_isa()
    try:
        native = _extension()
    except ImportError as error:
        _LOG.warning(
            "Attention runs on torch's own kernels: the native ones cannot be imported: %s", error
        )
        return NativePath(None, f"the native extension cannot be imported ({error})")
    has = [isa for isa in CPU_ISAS if native.available(native.Isa[isa])]
    if asked is None:
        return NativePath(has[-1], f"the best of {', '.join(has)}")
    if asked not in has:
        raise ConfigError(f"{CPU_ISA}={asked}: this build and processor have {', '.join(has)}.")
    return NativePath(asked, f"{CPU_ISA} asks for it")


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
        native = _extension()
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


def _extension() -> ModuleType:
    return importlib.import_module("kvspan._native")
