"""Products with weights: torch's own, or a native kernel where rows are few and reading is all there is.

Weights stay as they were loaded: nothing is packed, so nothing is kept twice.
"""

from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

from kvspan.native import NativePath, extension, native_path

MOST_ROWS = 48
"""Rows up to which the native kernel is the faster one."""


class NativeLinear:
    """Linear layers on few rows of bf16.

    Args:
        path: whose kernels run.
    """

    def __init__(self, path: NativePath) -> None:
        native = extension()
        self._linear, self._isa = native.linear, native.Isa[path.isa]

    @staticmethod
    def takes(x: Tensor, weight: Tensor) -> bool:
        """Whether it serves these, and faster than torch does."""
        return (
            weight.dtype == x.dtype == torch.bfloat16
            and weight.device.type == "cpu"
            and x.shape[0] <= MOST_ROWS
            and x.stride(1) == 1
        )

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
        """See `linear`."""
        out = x.new_empty(x.shape[0], weight.shape[0], dtype=out_dtype)
        self._linear(
            self._isa,
            torch.get_num_threads(),
            x.data_ptr(),
            x.shape[0],
            x.stride(0),
            weight.data_ptr(),
            weight.shape[0],
            weight.stride(0),
            weight.shape[1],
            0 if bias is None else bias.data_ptr(),
            out.data_ptr(),
            out_dtype == torch.float32,
        )
        return out


@cache
def native_linear() -> NativeLinear | None:
    """The native kernel, if the instruction set that runs here has one."""
    path = native_path()
    if path.isa is None:
        return None
    native = extension()
    return NativeLinear(path) if native.has_linear(native.Isa[path.isa]) else None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias.

    Args:
        x: [R, inputs].
        weight: [outputs, inputs].
        bias: [outputs].

    Returns:
        [R, outputs] in `x.dtype`.
    """
    native = native_linear()
    if native is None or not native.takes(x, weight):
        return F.linear(x, weight, bias)
    return native(x, weight, bias, x.dtype)


def wide_linear(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T in float32, whatever the dtype of its factors; see `linear`."""
    native = native_linear()
    if native is None or not native.takes(x, weight):
        return F.linear(x, weight).float()
    return native(x, weight, None, torch.float32)
