"""Products with a weight, in the form that the weight is kept in. Knows no layers and no groups.

    plain    as it was loaded, [outputs, inputs]: torch's product, for any dtype and device
    packed   bf16 on a CPU: panels of 32 outputs, read front to back by a native kernel, the faster
             one for a single row as for thousands

A weight is kept once: packing it lets go of the plain one. A gated weight has two halves, gate and up,
and its product is silu(gate) * up, half as wide.
"""

from functools import cache
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from kvspan.layers.rows import row_ops
from kvspan.native import extension, native_path, prefer_huge_pages
from kvspan.topology import Span

PANEL = 32
"""Outputs of a panel; `LINEAR_PANEL` of the native kernels."""
HUGE_PAGE_BYTES = 2 << 20


class Product(Protocol):
    """Products with one weight [outputs, inputs], and its bias [outputs] if it has one."""

    def __call__(self, x: Tensor) -> Tensor:
        """x [R, inputs] -> x @ weight.T + bias, [R, outputs] in `x.dtype`."""
        ...

    def wide(self, x: Tensor, outputs: Span | None = None) -> Tensor:
        """The same in float32, whatever the dtype of the factors; of some outputs alone, if asked."""
        ...

    def over(self, x: Tensor, inputs: Span, *, adds_bias: bool = True, wide: bool = False) -> Tensor:
        """The same of rows that have some inputs alone: x [R, inputs.size], zeros everywhere else."""
        ...

    def some(self, x: Tensor, outputs: Span) -> Tensor:
        """Some of the outputs alone: [R, outputs.size]."""
        ...

    def rows(self, numbers: Tensor, *, first: int) -> Tensor:
        """Rows of the weight, which is not gated.

        Args:
            numbers: [n] int64, row numbers in a larger weight of which this one is a part.
            first: where it begins there.

        Returns:
            [n, inputs]; zeros for rows of other parts.
        """
        ...


class PlainProduct:
    """Fulfils `Product` with torch's operators.

    Args:
        weight: [outputs, inputs].
        bias: [outputs].
        gated: whether its halves are gate and up.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, *, gated: bool = False) -> None:
        self._weight, self._bias, self._gated = weight, bias, gated

    def __call__(self, x: Tensor) -> Tensor:
        """See `Product`."""
        made = F.linear(x, self._weight, self._bias)
        return row_ops(made).silu_mul(made) if self._gated else made

    def wide(self, x: Tensor, outputs: Span | None = None) -> Tensor:
        """See `Product`."""
        return (self(x) if outputs is None else self.some(x, outputs)).float()

    def over(self, x: Tensor, inputs: Span, *, adds_bias: bool = True, wide: bool = False) -> Tensor:
        """See `Product`."""
        bias = self._bias if adds_bias else None
        made = F.linear(x, self._weight[:, inputs.start : inputs.stop], bias)
        return made.float() if wide else made

    def some(self, x: Tensor, outputs: Span) -> Tensor:
        """See `Product`."""
        rows = slice(outputs.start, outputs.stop)
        if not self._gated:
            return F.linear(x, self._weight[rows], None if self._bias is None else self._bias[rows])
        if 2 * outputs.size == len(self._weight):
            return self(x)  # as below, in one product
        halves = [PlainProduct(*half).some(x, outputs) for half in self._halves()]
        both = row_ops(x).side_by_side(halves)
        return row_ops(both).silu_mul(both)

    def rows(self, numbers: Tensor, *, first: int) -> Tensor:
        """See `Product`."""
        local = numbers - first
        mine = (local >= 0) & (local < len(self._weight))
        rows = self._weight.new_zeros(len(numbers), self._weight.shape[1])
        rows[mine] = self._weight[local[mine]]
        return rows

    def _halves(self) -> list[tuple[Tensor, Tensor | None]]:
        """Weight and bias of the gates, and of the ups."""
        biases = (None, None) if self._bias is None else self._bias.chunk(2)
        return list(zip(self._weight.chunk(2), biases, strict=True))


class PackedProduct:
    """Fulfils `Product` with native kernels, in bf16.

    Args:
        weight: [outputs, inputs] bf16; not kept.
        bias: [outputs] bf16.
        gated: whether its halves are gate and up; each panel has some of both.
        memory: where the packed weight goes, `packed_bytes` of uint8.
        isa: whose kernels run.
    """

    def __init__(
        self, weight: Tensor, bias: Tensor | None, *, gated: bool = False, memory: Tensor, isa: str
    ) -> None:
        native = extension()
        rows, inputs = weight.shape
        self._gated = gated
        self._whole = _Part(0, rows // 2 if gated else rows, 0, inputs)
        self._panels = _pack(_in_turns(weight) if gated else weight, memory)  # [panels, pairs, PANEL]
        self._bias = bias  # keeps alive what the kernel reads
        self._layer = native.LinearLayer(
            native.Isa[isa],
            self._panels.data_ptr(),
            self._whole.outputs,
            inputs,
            0 if bias is None else bias.data_ptr(),
            gated,
        )

    def __call__(self, x: Tensor) -> Tensor:
        """See `Product`."""
        return self._made(x, self._whole)

    def wide(self, x: Tensor, outputs: Span | None = None) -> Tensor:
        """See `Product`."""
        if outputs is None:
            return self._made(x, self._whole, torch.float32)
        return self._some(x, outputs, torch.float32)

    def over(self, x: Tensor, inputs: Span, *, adds_bias: bool = True, wide: bool = False) -> Tensor:
        """See `Product`."""
        odd = inputs.start % 2  # inputs lie in pairs
        x = F.pad(x, (1, 0)) if odd else x
        first = inputs.start - odd
        part = self._whole._replace(first_input=first, inputs=x.shape[1], adds_bias=adds_bias)
        return self._made(x, part, torch.float32 if wide else torch.bfloat16)

    def some(self, x: Tensor, outputs: Span) -> Tensor:
        """See `Product`; panels are read whole."""
        return self._some(x, outputs, torch.bfloat16)

    def _some(self, x: Tensor, outputs: Span, dtype: torch.dtype) -> Tensor:
        before = outputs.start % (PANEL // 2 if self._gated else PANEL)
        first, num_outputs = outputs.start - before, before + outputs.size
        made = self._made(x, self._whole._replace(first_output=first, outputs=num_outputs), dtype)
        return made[:, before:]

    def rows(self, numbers: Tensor, *, first: int) -> Tensor:
        """See `Product`."""
        out = torch.empty(len(numbers), self._whole.inputs, dtype=torch.bfloat16)
        threads = torch.get_num_threads()
        self._layer.rows(threads, numbers.data_ptr(), len(numbers), first, out.data_ptr())
        return out

    def _made(self, x: Tensor, part: "_Part", dtype: torch.dtype = torch.bfloat16) -> Tensor:
        assert x.dtype == torch.bfloat16, "a packed weight is multiplied in bf16"
        layer = self._layer if part == self._whole else self._layer.part(*part)
        out = torch.empty(x.shape[0], part.outputs, dtype=dtype)
        if x.stride(1) != 1:
            x = x.contiguous()
        layer(
            torch.get_num_threads(),
            x.data_ptr(),
            x.shape[0],
            x.stride(0),
            out.data_ptr(),
            dtype == torch.float32,
        )
        return out


class _Part(NamedTuple):
    """Some outputs of a weight in panels, of some inputs.

    Args:
        first_output: the first of a panel.
        outputs: how many.
        first_input: the first of a pair.
        inputs: how many.
        adds_bias: whether products add the bias, if there is one.
    """

    first_output: int
    outputs: int
    first_input: int
    inputs: int
    adds_bias: bool = True


class Arena:
    """Memory that packed weights share, one behind the other, in huge pages where there are such.

    Args:
        num_bytes: of all that is taken.
    """

    def __init__(self, num_bytes: int) -> None:
        whole = torch.empty(num_bytes + HUGE_PAGE_BYTES, dtype=torch.uint8)
        self._left = whole[-whole.data_ptr() % HUGE_PAGE_BYTES :]
        prefer_huge_pages(self._left.data_ptr(), self._left.numel())

    def take(self, num_bytes: int) -> Tensor:
        """The next [num_bytes] uint8."""
        taken, self._left = self._left[:num_bytes], self._left[num_bytes:]
        assert len(taken) == num_bytes, "an arena was made too small"
        return taken


def packed_bytes(weight: Tensor, *, gated: bool = False) -> int:
    """Bytes that a weight takes when it is packed; 0 = it stays plain."""
    if packing_isa() is None or weight.dtype != torch.bfloat16 or weight.device.type != "cpu":
        return 0
    rows, inputs = weight.shape
    panels = _ceil_div(rows // 2, PANEL // 2) if gated else _ceil_div(rows, PANEL)
    return panels * PANEL * _ceil_div(inputs, 2) * 4


@cache
def packing_isa() -> str | None:
    """The instruction set whose kernels multiply with packed weights; None = torch does better."""
    isa = native_path().isa
    return None if isa == "portable" else isa


def _pack(weight: Tensor, memory: Tensor) -> Tensor:
    """[panels, pairs, PANEL] int32: neighbouring inputs in pairs, zeros where outputs or inputs end."""
    outputs, inputs = weight.shape
    panels, pairs = _ceil_div(outputs, PANEL), _ceil_div(inputs, 2)
    packed = memory.view(torch.int32).view(panels, pairs, PANEL)
    even = F.pad(weight, (0, inputs % 2)).flatten().view(torch.int32).view(outputs, pairs)
    full = outputs // PANEL
    packed[:full] = even[: full * PANEL].view(full, PANEL, pairs).transpose(1, 2)
    if full < panels:
        packed[full] = F.pad(even[full * PANEL :], (0, 0, 0, panels * PANEL - outputs)).t()
    return packed


def _in_turns(weight: Tensor) -> Tensor:
    """[2 * outputs, inputs], gates then ups -> half a panel of each in turn, zeros where they end."""
    half = PANEL // 2
    outputs, inputs = weight.shape[0] // 2, weight.shape[1]
    padded = F.pad(weight.view(2, outputs, inputs), (0, 0, 0, -outputs % half))
    return padded.view(2, -1, half, inputs).transpose(0, 1).reshape(-1, inputs)


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)
