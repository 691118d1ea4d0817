"""The SiLU-gated MLP, its inner dim shared over a group, and for few rows over a team of such groups.

Knows groups; knows no models.
"""

from torch import Tensor, nn

from kvspan.comm.group import Group
from kvspan.layers.linear import GatedLinear, RowLinear, Storage
from kvspan.layers.parameter import Target, linear_targets
from kvspan.layers.team import Team
from kvspan.topology import cut


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)), of which a rank keeps a part of the inner dim.

    Args:
        hidden_size: width of input and output.
        inner_size: of the inner dim, over all ranks.
        bias: whether the linear layers have one.
        group: the ranks that share the inner dim.
    """

    def __init__(
        self, hidden_size: int, inner_size: int, *, bias: bool, group: Group, storage: Storage
    ) -> None:
        super().__init__()
        self.shape, self.bias = (inner_size, hidden_size), bias
        self.part, self.group = cut(inner_size, parts=group.size, index=group.rank), group
        self.gate_up = GatedLinear(hidden_size, self.part.size, bias=bias, storage=storage)
        self.down = RowLinear(
            self.part.size, hidden_size, bias=bias, adds_bias=group.rank == 0, storage=storage
        )

    def forward(self, x: Tensor, team: Team) -> Tensor:
        """[R, hidden_size] -> [R, hidden_size]."""
        summand = team.scattered(self.summand(team.gathered(x), team))
        return self.group.all_reduce(summand).wait()

    def summand(self, x: Tensor, team: Team) -> Tensor:
        """What this rank adds to the sum over the group, and over the team.

        Args:
            x: [R, hidden_size], rows of the whole team.
            team: who shares this rank's part of the inner dim.

        Returns:
            [R, hidden_size].
        """
        part = team.part(self.part.size)
        summand: Tensor = self.down(self.gate_up(x, part), part, adds_bias=team.rank == 0)
        return summand

    def weight_targets(self, theirs: str, ours: str) -> dict[str, Target]:
        """Targets: fused gate and up here, two tensors in the checkpoint."""
        inner, size = self.shape
        targets: dict[str, Target] = {}
        for name, at in (("gate_proj", 0), ("up_proj", self.part.size)):
            targets |= linear_targets(
                f"{theirs}{name}",
                f"{ours}gate_up",
                (inner, size),
                dim=0,
                part=self.part,
                at=at,
                bias=self.bias,
            )
        return targets | linear_targets(
            f"{theirs}down_proj",
            f"{ours}down",
            (size, inner),
            dim=1,
            part=self.part,
            bias=self.bias,
        )
