"""Mixtures of experts: a router, experts of which a rank keeps a part, experts that all tokens go to.

    x ─┬─ router ─ experts and weights of each row ─┐
       ├─ rows grouped by expert ─ routed experts ──┴─ weighted sum ─ + ─ sum over the group
       └─ shared experts (gated or not) ──────────────────────────────┘

A rank keeps either a part of every expert's inner dim, or some experts whole (expert parallel). Either
way each rank sees all rows, computes a summand, and one all-reduce ends the layer. Knows no models.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kvspan.comm.group import Group
from kvspan.config.moe import MoeConfig
from kvspan.layers.linear import ColumnLinear, Storage
from kvspan.layers.matmul import Arena, PackedProduct, PlainProduct, Product, packed_bytes
from kvspan.layers.mlp import GatedMLP
from kvspan.layers.parameter import Target, elsewhere, sliced, whole
from kvspan.topology import Span, cut

_SCORING: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda logits: logits.softmax(dim=-1),
    "sigmoid": torch.sigmoid,
}
_TINY = 1e-20
"""Added to a sum of weights before it divides them."""


@dataclass(frozen=True, slots=True)
class Routing:
    """Where rows go.

    Args:
        experts: [R, k] int64, distinct in a row.
        weights: [R, k] float32, of each expert's output.
    """

    experts: Tensor
    weights: Tensor


class Router(nn.Module):
    """Finds each row's experts, in float32; every rank finds the same.

    Args:
        moe: how.
        hidden_size: width of a row.
    """

    def __init__(self, moe: MoeConfig, hidden_size: int, *, storage: Storage) -> None:
        super().__init__()
        self.moe = moe
        self.weight = storage.empty(moe.num_experts, hidden_size)
        # The bias moves picks by less than bfloat16 resolves, and checkpoints have it in float32.
        exact = Storage(torch.float32, storage.device)
        self.bias = exact.empty(moe.num_experts) if moe.correction_bias else None

    def forward(self, x: Tensor) -> Routing:
        """[R, hidden_size] -> where each row goes."""
        moe = self.moe
        scores = _SCORING[moe.scoring](F.linear(x.float(), self.weight.float()))  # [R, E]
        ranked = scores if self.bias is None else scores + self.bias
        experts = self._within_groups(ranked).topk(moe.experts_per_token, dim=-1).indices
        weights = scores.gather(1, experts)
        if moe.normalise:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + _TINY)
        return Routing(experts, weights * moe.scaling_factor)

    def _within_groups(self, ranked: Tensor) -> Tensor:
        """[R, E]: the same scores, -inf in groups that are not among a row's best."""
        moe = self.moe
        grouped = ranked.view(
            len(ranked), moe.num_groups, moe.num_experts // moe.num_groups
        )  # [R, G, E / G]
        counted = min(moe.group_scores, grouped.shape[-1])
        of_group = grouped.topk(counted, dim=-1).values.sum(dim=-1)  # [R, G]
        best = of_group.topk(moe.groups_per_token, dim=-1).indices
        out_of_reach = torch.ones_like(of_group, dtype=torch.bool).scatter(1, best, value=False)
        return grouped.masked_fill(out_of_reach[..., None], -torch.inf).view(ranked.shape)

    def weight_targets(self, theirs: str, ours: str) -> dict[str, Target]:
        """Targets; every rank keeps the whole router."""
        targets = {f"{theirs}weight": whole(f"{ours}weight", self.weight.shape)}
        if self.bias is not None:
            targets[f"{theirs}e_score_correction_bias"] = whole(f"{ours}bias", self.bias.shape)
        return targets


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
        self._gate_up: list[Product] = [PlainProduct(w, None, gated=True) for w in self.gate_up]
        self._down: list[Product] = [PlainProduct(w, None) for w in self.down]

    def pack(self, memory: Arena, *, isa: str) -> None:
        """See `Packable.pack`."""
        if not self.packed_bytes:
            return
        self._gate_up = [
            PackedProduct(w, None, gated=True, memory=memory.take(packed_bytes(w, gated=True)), isa=isa)
            for w in self.gate_up
        ]
        self._down = [
            PackedProduct(w, None, memory=memory.take(packed_bytes(w)), isa=isa) for w in self.down
        ]
        del self.gate_up, self.down

    @property
    def packed_bytes(self) -> int:
        """See `Packable.packed_bytes`."""
        gate_up = sum(packed_bytes(weight, gated=True) for weight in self.gate_up)
        return gate_up + sum(packed_bytes(weight) for weight in self.down)

    def forward(self, x: Tensor, routing: Routing) -> Tensor:
        """This rank's summand of the experts' weighted outputs.

        Rows are grouped by expert, so that an expert's weights are read once, and only if a row goes
        there. A row's outputs are added in the order of its experts, whoever shares the step with it.

        Args:
            x: [R, hidden_size].
            routing: where each row goes.

        Returns:
            [R, hidden_size] float32.
        """
        places, per_row = routing.experts.flatten(), routing.experts.shape[1]
        order = places.argsort(stable=True)  # [R * k]: choices of rows, expert by expert
        ends = torch.bincount(places, minlength=self.moe.num_experts).cumsum(0)
        bounds = [0, *ends.tolist()][self.experts.start : self.experts.stop + 1]
        weights = routing.weights.flatten()[:, None]
        out = x.new_zeros(x.shape, dtype=torch.float32)
        for expert, (start, stop) in enumerate(pairwise(bounds)):
            if start < stop:
                chosen = order[start:stop]
                rows = chosen // per_row
                out.index_add_(0, rows, self._one(expert, x[rows]) * weights[chosen])
        return out

    def _one(self, expert: int, x: Tensor) -> Tensor:
        """[n, hidden_size] -> [n, hidden_size], of one expert of this rank."""
        return self._down[expert](self._gate_up[expert](x))

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


class MoE(nn.Module):
    """A layer of experts.

    Args:
        moe: sizes and routing.
        hidden_size: width of input and output.
        expert_parallel: whether a rank keeps whole experts, or a part of each.
        group: the ranks that share the experts.
    """

    def __init__(
        self,
        moe: MoeConfig,
        hidden_size: int,
        *,
        expert_parallel: bool,
        group: Group,
        storage: Storage,
    ) -> None:
        super().__init__()
        self.group = group
        self.router = Router(moe, hidden_size, storage=storage)
        experts, inner = Span(0, moe.num_experts), Span(0, moe.intermediate_size)
        if expert_parallel:
            experts = cut(experts.size, parts=group.size, index=group.rank, unit=1)
        else:
            inner = cut(inner.size, parts=group.size, index=group.rank)
        self.experts = Experts(moe, hidden_size, experts=experts, inner=inner, storage=storage)
        self.shared, self.shared_gate = None, None
        if moe.shared_intermediate_size:
            width = moe.shared_intermediate_size
            self.shared = GatedMLP(hidden_size, width, bias=False, group=group, storage=storage)
        if moe.shared_gate:
            self.shared_gate = ColumnLinear(hidden_size, 1, bias=False, storage=storage)

    def forward(self, x: Tensor) -> Tensor:
        """[R, hidden_size] -> [R, hidden_size]."""
        total = self.experts(x, self.router(x)).to(x.dtype)
        if self.shared is not None:
            shared = self.shared.summand(x)
            total += shared if self.shared_gate is None else shared * self.shared_gate(x).sigmoid()
        return self.group.all_reduce(total).wait()

    def weight_targets(self, theirs: str, ours: str) -> dict[str, Target]:
        """Targets; Hugging Face calls shared experts by one name with a gate, and by another without."""
        targets = self.router.weight_targets(f"{theirs}gate.", f"{ours}router.")
        targets |= self.experts.weight_targets(f"{theirs}experts.", f"{ours}experts.")
        if self.shared is not None:
            name = "shared_experts" if self.shared_gate is None else "shared_expert"
            targets |= self.shared.weight_targets(f"{theirs}{name}.", f"{ours}shared.")
        if self.shared_gate is not None:
            shape = self.shared_gate.weight.shape
            targets[f"{theirs}shared_expert_gate.weight"] = whole(f"{ours}shared_gate.weight", shape)
        return targets
