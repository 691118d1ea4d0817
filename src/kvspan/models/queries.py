"""Which columns of a DCP group's queries a rank projects, and how it comes by the others it needs.

    gather      each rank projects its part of the columns; rows that go to the keys gather the rest
    replicate   each rank projects all of them, and is a group of its own

Rows that stay with their heads need those that the rank's slice of the output touches; a part seldom
has less. Knows no weights.
"""

from collections.abc import Sequence

from torch import Tensor

from kvspan.comm.local import solo
from kvspan.layers.linear import gather_columns
from kvspan.models.base import RankContext
from kvspan.topology import Span, cuts


class GroupQueries:
    """Queries of a DCP group.

    Args:
        context: the rank.
        num_heads: H / A, heads of the group.
        head_dim: elements of a query.
        touched: for each rank of `RowGroups.columns`, the heads that its slice of the output touches.
    """

    def __init__(
        self, context: RankContext, *, num_heads: int, head_dim: int, touched: Sequence[Span]
    ) -> None:
        self._num_heads, self._head_dim = num_heads, head_dim
        columns = context.row_groups.columns
        self._group = solo() if context.replicate_q else columns
        self._parts = cuts(num_heads * head_dim, parts=self._group.size)
        self.part = self._parts[self._group.rank]
        self._touched = touched[columns.rank]
        # The same on all ranks, since it decides whether a collective runs.
        self._is_enough = all(
            part.start <= heads.start * head_dim and heads.stop * head_dim <= part.stop
            for part, heads in zip(
                self._parts * (len(touched) // len(self._parts)), touched, strict=True
            )
            if heads.size
        )

    def all_heads(self, projected: Tensor) -> Tensor:
        """[n, columns of the part] -> [n, H / A, D]."""
        columns = gather_columns(projected, self._group, self._parts)
        return columns.reshape(len(projected), self._num_heads, self._head_dim)

    def own_heads(self, projected: Tensor) -> Tensor:
        """[n, columns of the part] -> [n, touched heads, D]."""
        heads = self._touched
        if not self._is_enough:
            return self.all_heads(projected)[:, heads.start : heads.stop]
        start = heads.start * self._head_dim - self.part.start
        columns = projected[:, start : start + heads.size * self._head_dim]
        return columns.reshape(len(projected), heads.size, self._head_dim)
