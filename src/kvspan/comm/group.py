"""What ranks say to each other, as a protocol. A layer is given its `Group` in the constructor.

All sizes are data that every rank computes alike; a rank may contribute nothing (size 0) but makes the
same calls in the same order as its neighbours. A group of one is an ordinary value.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from torch import Tensor

from kvspan.topology import Span, touched_heads

T_co = TypeVar("T_co", covariant=True)


class Pending(Protocol[T_co]):
    """A collective that is under way."""

    def wait(self) -> T_co:
        """The result; called once."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """A part of the attention output that one rank owns; equal to itself alone, so plans can hang on it.

    Args:
        rows: query rows: a slice, or their numbers [n] int64.
        columns: range of the flattened [H * D] axis of the group's heads.
    """

    rows: slice | Tensor
    columns: Span

    def heads(self, head_dim: int) -> Span:
        """Heads that the columns touch."""
        return touched_heads(self.columns, head_dim)


class Group(Protocol):
    """Ranks that exchange tensors. `rank` is the place in this group, not in the world."""

    @property
    def rank(self) -> int:
        """This rank's place in the group, 0..size-1."""
        ...

    @property
    def size(self) -> int:
        """Ranks in the group."""
        ...

    def all_reduce(self, x: Tensor) -> Pending[Tensor]:
        """Sums `x` over the ranks. The input may be overwritten.

        Args:
            x: any shape, the same on each rank.
        """
        ...

    def all_gather(self, x: Tensor, sizes: Sequence[int]) -> Pending[Tensor]:
        """Concatenates everybody's `x` along dim 0, in order of rank.

        Args:
            x: [sizes[rank], ...]; the other dims are the same on each rank.
            sizes: dim 0 of each rank's `x`.

        Returns:
            [sum(sizes), ...] on every rank.
        """
        ...

    def reduce_scatter(self, x: Tensor, sizes: Sequence[int]) -> Pending[Tensor]:
        """Sums `x` over the ranks and leaves each rank its part of dim 0.

        Args:
            x: [sum(sizes), ...], the same shape on each rank.
            sizes: dim 0 of each rank's part, in order of rank.

        Returns:
            [sizes[rank], ...].
        """
        ...

    def all_to_all(self, parts: Sequence[Tensor], sizes: Sequence[int]) -> Pending[list[Tensor]]:
        """Sends `parts[j]` to rank j.

        Args:
            parts: one flat (1-D) tensor for each rank, all of one dtype.
            sizes: elements that arrive from each rank.

        Returns:
            What arrived, one flat tensor for each rank, in order of rank.
        """
        ...

    def merge_scatter(self, out: Tensor, lse: Tensor, pieces: Sequence[Piece]) -> Pending[Tensor] | None:
        """Merges partial attention over the ranks and leaves each rank its piece: if it can, at once.

        Args:
            out: [R, H, D], this rank's partials over its own keys.
            lse: [R, H] float32, natural log; not finite = no key seen here.
            pieces: what each rank owns, in order of rank.

        Returns:
            A pending [n, c] in `out.dtype`, this rank's piece of attention over all keys; or None, on
            every rank alike, if this group cannot do it for such tensors: nothing has been sent then.
        """
        ...


class World(Protocol):
    """All ranks of a replica, from which groups are made once, at start."""

    @property
    def rank(self) -> int:
        """This rank's place in the world."""
        ...

    @property
    def size(self) -> int:
        """Ranks in all."""
        ...

    def group(self, partition: Sequence[Sequence[int]]) -> Group:
        """This rank's group of a partition of the world.

        Every rank calls this with the same partitions in the same order.

        Args:
            partition: disjoint groups of world ranks that together are all of them. A member's
                place in its tuple is its `rank` in the group, in whatever order they stand.
        """
        ...
