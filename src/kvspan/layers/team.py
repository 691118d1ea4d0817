"""Rows of several ranks that keep the same weights: each on its own, or as a team.

    alone    a rank multiplies its own rows with all of a layer's weights
    a team   everybody's rows are gathered, a rank multiplies them with its part of the weights, and gets
             its own rows' sums back: for few rows, where reading weights is all that a product costs

Knows groups; knows no weights and no requests.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from kvspan.comm.group import Group
from kvspan.topology import Span, cut

PART_UNIT = 32
"""Outputs or inputs in multiples of which weights are cut: a panel of packed ones (`layers.matmul`)."""


@dataclass(frozen=True, slots=True)
class Team:
    """Who multiplies the rows of a step with which part of the weights.

    Args:
        group: ranks with the same weights, such as PCP coordinates.
        sizes: rows that each of them brings; empty = each works alone.
    """

    group: Group
    sizes: Sequence[int] = ()

    @property
    def size(self) -> int:
        """Ranks that share the weights out: 1 = each reads all of them."""
        return max(len(self.sizes), 1)

    @property
    def rank(self) -> int:
        """This rank's place among them."""
        return self.group.rank if self.sizes else 0

    def part(self, size: int) -> Span:
        """This rank's part of a dim of the weights; may be empty."""
        return cut(size, parts=self.size, index=self.rank, unit=PART_UNIT)

    def parts(self, size: int) -> list[Span]:
        """Everybody's, in order."""
        return [cut(size, parts=self.size, index=i, unit=PART_UNIT) for i in range(self.size)]

    def gathered(self, x: Tensor) -> Tensor:
        """[own rows, ...] -> [rows of the whole team, ...], in order of rank."""
        return self.group.all_gather(x, self.sizes).wait() if self.sizes else x

    def scattered(self, summands: Tensor) -> Tensor:
        """[rows of the whole team, ...], summands of each rank -> [own rows, ...], their sums."""
        return self.group.reduce_scatter(summands, self.sizes).wait() if self.sizes else summands
