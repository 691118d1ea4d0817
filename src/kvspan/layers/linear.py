"""Linear layers of which a rank keeps a part. Knows groups; knows no models.

columns  a rank keeps some of the outputs: no exchange, its output is a slice
rows     a rank keeps some of the inputs: its output is a summand, the group adds them up
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from kvspan.comm.group import Group
from kvspan.layers.matmul import (
    Arena,
    PackedProduct,
    PlainProduct,
    Product,
    packed_bytes,
    packing_isa,
)
from kvspan.layers.rows import among, row_ops, together
from kvspan.topology import Span

LINE_BYTES = 64
"""Of a cache line."""


@dataclass(frozen=True, slots=True)
class Storage:
    """Where parameters lie, and as what.

    Args:
        dtype: of their elements.
        device: cpu, cuda, or meta for shapes alone.
    """

    dtype: torch.dtype
    device: torch.device

    def empty(self, *shape: int) -> nn.Parameter:
        """A parameter to be filled by a loader; it takes no gradient."""
        return nn.Parameter(
            torch.empty(shape, dtype=self.dtype, device=self.device), requires_grad=False
        )


class Matrix(nn.Module):
    """A weight, a bias if there is one, and products with them.

    Args:
        outputs: rows of the weight; may be 0.
        inputs: columns of the weight; may be 0.
        bias: whether there is a bias.
        adds_bias: whether products add it.
        gated: whether its halves are gate and up, and products are silu(gate) * up.
    """

    def __init__(
        self,
        outputs: int,
        inputs: int,
        *,
        bias: bool,
        storage: Storage,
        adds_bias: bool = True,
        gated: bool = False,
    ) -> None:
        super().__init__()
        self.weight = storage.empty(outputs, inputs)
        self.bias = storage.empty(outputs) if bias else None
        self._adds_bias, self._gated = adds_bias, gated
        self.product: Product = PlainProduct(self.weight, self._added_bias, gated=gated)

    def pack(self, memory: Arena, *, isa: str) -> None:
        """Keeps the weight in packed form from here on, if its dtype and device have one."""
        if not self.packed_bytes:
            return
        self.product = PackedProduct(
            self.weight,
            self._added_bias,
            gated=self._gated,
            memory=memory.take(self.packed_bytes),
            isa=isa,
        )
        del self.weight

    @property
    def packed_bytes(self) -> int:
        """Bytes that the weight takes when it is packed; 0 = it stays as it is."""
        return packed_bytes(self.weight, gated=self._gated)

    @property
    def _added_bias(self) -> Tensor | None:
        return self.bias if self._adds_bias else None


class Packable(Protocol):
    """A layer with weights that can be packed."""

    def pack(self, memory: Arena, *, isa: str) -> None:
        """Keeps them in packed form from here on, if their dtype and device have one."""
        ...

    @property
    def packed_bytes(self) -> int:
        """Bytes that they take when they are packed; 0 = they stay as they are."""
        ...


def pack(layers: Sequence[Packable]) -> None:
    """Brings weights that will not change any more in the form in which products are fastest."""
    if (isa := packing_isa()) is None:
        return
    memory = Arena(sum(layer.packed_bytes for layer in layers))
    for layer in layers:
        layer.pack(memory, isa=isa)


class PlainMatrix(nn.Module):
    """A weight that stays as it was loaded; packed, it lies among the packed ones, in huge pages.

    Args:
        outputs: rows of the weight.
        inputs: columns of the weight.
    """

    def __init__(self, outputs: int, inputs: int, *, storage: Storage) -> None:
        super().__init__()
        self.weight = storage.empty(outputs, inputs)

    def pack(self, memory: Arena, *, isa: str) -> None:
        """See `Packable.pack`."""
        del isa  # all read the same bytes
        if not self.packed_bytes:
            return
        taken = memory.take(self.packed_bytes)[: self.weight.nbytes]
        moved = taken.view(self.weight.dtype).view(self.weight.shape).copy_(self.weight)
        self.weight = nn.Parameter(moved, requires_grad=False)

    @property
    def packed_bytes(self) -> int:
        """See `Packable.packed_bytes`; whole lines, as what lies behind it begins with one."""
        return -(-self.weight.nbytes // LINE_BYTES) * LINE_BYTES if packed_bytes(self.weight) else 0


class ColumnLinear(Matrix):
    """Some outputs of a linear layer.

    Args:
        in_features: width of the input, whole on every rank.
        out_features: outputs that this rank keeps; may be 0.
        bias: whether the outputs have a bias.
    """

    def __init__(self, in_features: int, out_features: int, *, bias: bool, storage: Storage) -> None:
        super().__init__(out_features, in_features, bias=bias, storage=storage)

    def forward(self, x: Tensor) -> Tensor:
        """[R, in_features] -> [R, out_features]."""
        return self.product(x)


class SplitLinear(Matrix):
    """Outputs of several kinds, of which rows do not all need the same.

    Args:
        in_features: width of the input, whole on every rank.
        out_features: outputs that this rank keeps, of all kinds; may be 0.
        bias: whether the outputs have a bias.
    """

    def __init__(self, in_features: int, out_features: int, *, bias: bool, storage: Storage) -> None:
        super().__init__(out_features, in_features, bias=bias, storage=storage)

    def forward(self, x: Tensor, kinds: Sequence[Span]) -> list[Tensor]:
        """What some rows need; kinds that lie side by side are one product.

        Args:
            x: [R, in_features].
            kinds: some outputs each, in order.

        Returns:
            [R, size] of each kind.
        """
        made: list[Tensor] = []
        for run in side_by_side(kinds):
            product = self.product.some(x, Span(run[0].start, run[-1].stop))
            made += torch.split(product, [kind.size for kind in run], dim=-1)
        return made


def side_by_side(spans: Sequence[Span]) -> list[list[Span]]:
    """Spans in order, those in one list of which each begins where the one before it ends."""
    runs: list[list[Span]] = []
    for span in spans:
        if runs and runs[-1][-1].stop == span.start:
            runs[-1].append(span)
        else:
            runs.append([span])
    return runs


class GatedLinear(Matrix):
    """Some outputs of silu(gate(x)) * up(x), of which gate and up are linear layers.

    Args:
        in_features: width of the input, whole on every rank.
        out_features: outputs that this rank keeps; may be 0.
        bias: whether gate and up have a bias.
    """

    def __init__(self, in_features: int, out_features: int, *, bias: bool, storage: Storage) -> None:
        super().__init__(2 * out_features, in_features, bias=bias, storage=storage, gated=True)

    def forward(self, x: Tensor, outputs: Span) -> Tensor:
        """[R, in_features] -> [R, outputs.size], of some of the outputs that this rank keeps."""
        return self.product.some(x, outputs)


class RowLinear(Matrix):
    """A linear layer over some of its inputs: what it gives is a summand.

    Args:
        in_features: inputs that this rank keeps; may be 0.
        out_features: width of the output, whole on every rank.
        bias: whether there is one; every rank keeps it, and one of them adds it.
        adds_bias: whether this rank may be that one.
    """

    def __init__(
        self, in_features: int, out_features: int, *, bias: bool, adds_bias: bool, storage: Storage
    ) -> None:
        super().__init__(out_features, in_features, bias=bias, storage=storage, adds_bias=adds_bias)

    def forward(self, x: Tensor, inputs: Span, *, adds_bias: bool) -> Tensor:
        """[R, inputs.size], some of the inputs that this rank keeps -> [R, out_features]."""
        return self.product.over(x, inputs, adds_bias=adds_bias)


@dataclass(frozen=True, slots=True)
class Attended:
    """Rows that have some of a rank's inputs.

    Args:
        rows: which they are.
        values: [n, inputs.size].
        inputs: which of the inputs that the rank keeps.
    """

    rows: slice | Tensor
    values: Tensor
    inputs: Span


class OutLinear(Matrix):
    """The output of attention: as `RowLinear`, of rows that each have some of this rank's inputs.

    Args:
        in_features: inputs that this rank keeps; may be 0.
        out_features: width of the output, whole on every rank.
        bias: whether there is one; every rank keeps it and the group's first rank adds it.
        group: the ranks whose inputs together are all of them.
    """

    def __init__(
        self, in_features: int, out_features: int, *, bias: bool, group: Group, storage: Storage
    ) -> None:
        super().__init__(
            out_features, in_features, bias=bias, storage=storage, adds_bias=group.rank == 0
        )
        self.group = group

    def forward(
        self, parts: Sequence[Attended], *, size: int, own: slice | Tensor, num_rows: int
    ) -> Tensor:
        """The sum over the group.

        Args:
            parts: this rank's rows, each once; at least one part, which may have none.
            size: how many they are.
            own: which of all rows they are; to the others this rank adds nothing.
            num_rows: R, of all.

        Returns:
            [R, out_features].
        """
        if len({part.inputs for part in parts}) == 1:
            values = together(size, [(part.rows, part.values) for part in parts])
            summand = self.product.over(values, parts[0].inputs)
        else:
            products = [(part.rows, self.product.over(part.values, part.inputs)) for part in parts]
            summand = together(size, products)
        summand = among(num_rows, own, summand, rest=self._added_bias)
        return self.group.all_reduce(summand).wait()


def gather_columns(x: Tensor, group: Group, parts: Sequence[Span]) -> Tensor:
    """Puts everybody's columns side by side.

    Args:
        x: [R, parts[rank].size], this rank's columns.
        group: who has the others.
        parts: which columns each rank has, in order and without gaps.

    Returns:
        [R, sum of all sizes] on every rank.
    """
    if len(parts) == 1:
        return x  # all columns already; what is spared is two copies, of whole logits among others
    rows = x.shape[0]
    sizes = [rows * part.size for part in parts]
    ops = row_ops(x)
    flat = group.all_gather(ops.side_by_side([x]).flatten(), sizes).wait()
    pieces = flat.split_with_sizes(sizes)
    shaped = [piece.view(rows, part.size) for piece, part in zip(pieces, parts, strict=True)]
    return ops.side_by_side(shaped)
