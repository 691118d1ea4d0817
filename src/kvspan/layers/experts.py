"""Routed experts, or what one rank keeps of them. Knows no router and no groups of ranks.

Rows are grouped by expert, so that an expert's weights are read once, and only if a row goes there. A
row's outputs are added in the order of its experts, whoever shares the step with it.

    few rows     one native operator: which experts run is read when it does, so a tape can play it
    many rows    expert by expert in Python, each a product as any other
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from kvspan.config.moe import MoeConfig
from kvspan.layers.linear import Storage
from kvspan.layers.matmul import Arena, PackedProduct, PlainProduct, Product, packed_bytes
from kvspan.layers.parameter import Target, elsewhere, sliced
from kvspan.layers.routing import Routing
from kvspan.layers.team import Team
from kvspan.native import extension
from kvspan.topology import Span

MOST_NATIVE_ROWS = 512
"""Of one operator: half the time that grouping them in Python takes (75 ms and 147: 512 rows, two
threads, 6 of 64 experts of 1024 x 704). Of thousands, inputs should stay in a core's cache."""


@dataclass(frozen=True, slots=True)
class Shared:
    """What experts that all rows go to add.

    Args:
        values: [R, hidden_size].
        gate: [R, 1], whose sigmoid weighs them; None = they are taken whole.
    """

    values: Tensor
    gate: Tensor | None = None


class Experts(nn.Module):
    """Routed experts, or what one rank keeps of them.

    Args:
        moe: how many there are, and how wide.
        hidden_size: width of input and output.
        experts: those that this rank keeps.
        inner: the part of their inner dim that it keeps.
    """

    def __init__(
        self, moe: MoeConfig, hidden_size: int, *, experts: Span, inner: Span, storage: Storage
    ) -> None:
        super().__init__()
        self.moe, self.hidden_size, self.experts, self.inner = moe, hidden_size, experts, inner
        self.gate_up = storage.empty(experts.size, 2 * inner.size, hidden_size)
        self.down = storage.empty(experts.size, hidden_size, inner.size)
        self._products: _Products = _Grouped(
            experts,
            gate_up=[PlainProduct(w, None, gated=True) for w in self.gate_up],
            down=[PlainProduct(w, None) for w in self.down],
        )

    def pack(self, memory: Arena, *, isa: str) -> None:
        """See `Packable.pack`."""
        if not self.packed_bytes:
            return
        gate_up, down = (memory.take(num_bytes) for num_bytes in self._parts_bytes)
        self._products = _Native(
            _Grouped(
                self.experts,
                gate_up=[
                    PackedProduct(w, None, gated=True, memory=m, isa=isa)
                    for w, m in zip(self.gate_up, _equal_parts(gate_up, self.experts.size), strict=True)
                ],
                down=[
                    PackedProduct(w, None, memory=m, isa=isa)
                    for w, m in zip(self.down, _equal_parts(down, self.experts.size), strict=True)
                ],
            ),
            memory=(gate_up, down),
            sizes=(self.hidden_size, self.inner.size),
            isa=isa,
        )
        del self.gate_up, self.down

    @property
    def packed_bytes(self) -> int:
        """See `Packable.packed_bytes`."""
        return sum(self._parts_bytes)

    @property
    def _parts_bytes(self) -> tuple[int, int]:
        gate_up = sum(packed_bytes(weight, gated=True) for weight in self.gate_up)
        return gate_up, sum(packed_bytes(weight) for weight in self.down)

    def forward(self, x: Tensor, routing: Routing, shared: Shared | None, team: Team) -> Tensor:
        """This rank's summand of the layer's output, added up in float32.

        Args:
            x: [R, hidden_size], rows of the whole team.
            routing: where each row goes.
            shared: what is added to the experts' weighted outputs.
            team: who shares what this rank keeps of the inner dim.

        Returns:
            [R, hidden_size] in `x.dtype`.
        """
        return self._products(x, routing, shared, team.part(self.inner.size))

    def weight_targets(self, theirs: str, ours: str) -> dict[str, Target]:
        """Targets: experts stacked, gate and up fused here; three tensors of each in the checkpoint."""
        inner, size = self.moe.intermediate_size, self.hidden_size
        targets: dict[str, Target] = {}
        for i in range(self.moe.num_experts):
            for name, parameter, shape, dim, at in (
                ("gate_proj", "gate_up", (inner, size), 0, 0),
                ("up_proj", "gate_up", (inner, size), 0, self.inner.size),
                ("down_proj", "down", (size, inner), 1, 0),
            ):
                within = (i - self.experts.start,)
                targets[f"{theirs}{i}.{name}.weight"] = (
                    sliced(f"{ours}{parameter}", shape, dim=dim, part=self.inner, at=at, within=within)
                    if self.experts.start <= i < self.experts.stop
                    else elsewhere(shape)
                )
        return targets


class _Products(Protocol):
    """What `Experts.forward` does, in the form that weights are kept in."""

    def __call__(self, x: Tensor, routing: Routing, shared: Shared | None, part: Span) -> Tensor: ...


class _Grouped:
    """Expert by expert.

    Args:
        experts: numbers of those that are here.
        gate_up: of each the gated product, [n, hidden_size] -> [n, inner].
        down: of each [n, inner] -> [n, hidden_size].
    """

    def __init__(self, experts: Span, *, gate_up: Sequence[Product], down: Sequence[Product]) -> None:
        self.experts = experts
        self._gate_up, self._down = gate_up, down

    def __call__(self, x: Tensor, routing: Routing, shared: Shared | None, part: Span) -> Tensor:
        places, per_row = routing.experts.flatten(), routing.experts.shape[1]
        order = places.argsort(stable=True)  # [R * k]: choices of rows, expert by expert
        ends = torch.bincount(places, minlength=self.experts.stop).cumsum(0)
        bounds = [0, *ends.tolist()][self.experts.start : self.experts.stop + 1]
        weights = routing.weights.flatten()[:, None]
        out = x.new_zeros(x.shape, dtype=torch.float32)
        for expert, (start, stop) in enumerate(pairwise(bounds)):
            if start < stop:
                chosen = order[start:stop]
                rows = chosen // per_row
                inner = self._gate_up[expert].some(x[rows], part)
                made = self._down[expert].over(inner, part, wide=True)
                out.index_add_(0, rows, made * weights[chosen])
        if shared is not None:
            gate = shared.gate
            out += shared.values if gate is None else shared.values * gate.float().sigmoid()
        return out.to(x.dtype)


class _Native:
    """Few rows as one operator, of packed weights.

    Args:
        many: for more rows.
        memory: of gated and of other packed weights, those of all experts one behind the other.
        sizes: hidden and inner.
        isa: whose kernels run.
    """

    def __init__(
        self, many: _Grouped, *, memory: tuple[Tensor, Tensor], sizes: tuple[int, int], isa: str
    ) -> None:
        self._many, self._sizes = many, sizes
        self._memory = memory  # keeps alive what the kernel reads
        self._isa = extension().Isa[isa]
        self._made: dict[Span, Any] = {}

    def __call__(self, x: Tensor, routing: Routing, shared: Shared | None, part: Span) -> Tensor:
        if len(x) > MOST_NATIVE_ROWS:
            return self._many(x, routing, shared, part)
        num_rows, per_row = routing.experts.shape
        gathered, inner = (x.new_empty(num_rows * per_row, size) for size in (self._sizes[0], part.size))
        out = x.new_empty(num_rows, self._sizes[0])
        values, gate = (None, None) if shared is None else (shared.values, shared.gate)
        self._some(part)(
            torch.get_num_threads(),
            x.data_ptr(),
            num_rows,
            x.stride(0),
            routing.experts.data_ptr(),
            routing.weights.data_ptr(),
            per_row,
            0 if values is None else values.data_ptr(),
            0 if gate is None else gate.data_ptr(),
            gathered.data_ptr(),
            inner.data_ptr(),
            out.data_ptr(),
        )
        return out

    def _some(self, part: Span) -> Any:
        """The native operator of a part of the inner dim, made once."""
        if part not in self._made:
            experts, (gate_up, down) = self._many.experts, self._memory
            self._made[part] = extension().Experts(
                self._isa,
                experts.start,
                experts.size,
                *self._sizes,
                part.start,
                part.size,
                gate_up.data_ptr(),
                down.data_ptr(),
            )
        return self._made[part]


def _equal_parts(memory: Tensor, number: int) -> Sequence[Tensor]:
    """[number * n] -> as many [n], one behind the other."""
    return memory.view(number, -1).unbind() if number else ()
