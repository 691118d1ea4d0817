"""Which columns of a DCP group's queries a rank projects, of which rows, and how it comes by the others.

    gather      each rank projects its part of the columns; rows that go to the keys gather the rest
    replicate   each rank projects all of them, and is a group of its own

Rows that stay with their heads need those that the rank's slice of the output touches, and so a rank
that has all columns makes no others of them. A part seldom has less. Knows no weights.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from kvspan.comm.local import solo
from kvspan.layers.linear import SplitLinear, gather_columns
from kvspan.layers.rows import some_rows, together
from kvspan.models.base import Batch, RankContext
from kvspan.topology import Span, cuts


@dataclass(frozen=True, slots=True)
class Projected:
    """Queries of a step's rows before they are whole, and what the same layer makes beside them.

    Args:
        asking: [rows that ask, columns of the part], spread ones before local ones.
        gathered: [gathered rows, columns that they need].
        beside: [R, ...] of each kind.
    """

    asking: Tensor
    gathered: Tensor
    beside: tuple[Tensor, ...]


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
        self._all_columns = self._own_columns = Span(0, self.part.size)
        if self._is_enough:
            first = self._touched.start * head_dim - self.part.start if self._touched.size else 0
            self._own_columns = Span(0, self._touched.size * head_dim).shifted(first)

    def project(
        self, linear: SplitLinear, x: Tensor, batch: Batch, *, beside: Sequence[Span] = ()
    ) -> Projected:
        """Makes of each row the columns that it needs.

        Args:
            linear: outputs of which the first are the part's columns.
            x: [R, in_features].
            batch: the step.
            beside: other outputs, which all rows need.
        """
        sets = self._columns_of(batch, len(x))
        made = [linear(some_rows(x, rows), (columns, *beside)) for rows, columns in sets]
        others = tuple(
            together(len(x), [(rows, its[1 + i]) for (rows, _), its in zip(sets, made, strict=True)])
            for i in range(len(beside))
        )
        if len(made) == 2:
            return Projected(made[0][0], made[1][0], others)
        every = made[0][0]
        return Projected(
            some_rows(every, batch.asking_rows), some_rows(every, batch.gathered.rows), others
        )

    def _columns_of(self, batch: Batch, num_rows: int) -> list[tuple[slice | Tensor, Span]]:
        """Rows by the columns that are made of them; each row once."""
        if not batch.gathered.num_keys or self._own_columns == self._all_columns:
            return [(slice(0, num_rows), self._all_columns)]
        return [(batch.asking_rows, self._all_columns), (batch.gathered.rows, self._own_columns)]

    def all_heads(self, projected: Tensor) -> Tensor:
        """[n, columns of the part] -> [n, H / A, D]."""
        columns = gather_columns(projected, self._group, self._parts)
        return columns.reshape(len(projected), self._num_heads, self._head_dim)

    def own_heads(self, projected: Tensor) -> Tensor:
        """[n, columns that gathered rows need] -> [n, touched heads, D]."""
        heads = self._touched
        if not self._is_enough:
            return self.all_heads(projected)[:, heads.start : heads.stop]
        return projected.reshape(len(projected), heads.size, self._head_dim)
