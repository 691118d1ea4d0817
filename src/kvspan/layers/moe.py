"""Mixtures of experts: a router, experts of which a rank keeps a part, experts that all tokens go to.

    x ─┬─ router ─ experts and weights of each row ─┐
       ├─ rows grouped by expert ─ routed experts ──┴─ weighted sum ─ + ─ sum over the group
       └─ shared experts (gated or not) ──────────────────────────────┘

A rank keeps either a part of every expert's inner dim, or some experts whole (expert parallel). Either
way each rank sees all rows, computes a summand, and one all-reduce ends the layer. Knows no models.
"""

from torch import Tensor, nn

from kvspan.comm.group import Group
from kvspan.config.moe import MoeConfig
from kvspan.layers.experts import Experts, Shared
from kvspan.layers.linear import ColumnLinear, Storage
from kvspan.layers.mlp import GatedMLP
from kvspan.layers.parameter import Target, whole
from kvspan.layers.routing import Router
from kvspan.layers.team import Team
from kvspan.topology import Span, cut


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

    def forward(self, x: Tensor, team: Team) -> Tensor:
        """[R, hidden_size] -> [R, hidden_size]."""
        x = team.gathered(x)
        summand = self.experts(x, self.router(x), self._shared(x, team), team)
        return self.group.all_reduce(team.scattered(summand)).wait()

    def _shared(self, x: Tensor, team: Team) -> Shared | None:
        if self.shared is None:
            return None
        gate = None if self.shared_gate is None else self.shared_gate(x)
        return Shared(self.shared.summand(x, team), gate)

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
