"""Which rows of a step each PCP coordinate works on. Pure; knows no tensors and no groups.

    a long row (P = 2)    0 0 0 1 1 1 1 1 1 0 0 0    2P chunks, dealt so that causal work balances
    decode, short rows    whole, to the coordinate that has least to do so far

Every rank computes the shares of all coordinates from the same global values, and so knows how much
each of them brings to a collective. P = 1 is one coordinate that has everything.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from kvspan.layout import Chunk, zigzag
from kvspan.step import Row
from kvspan.topology import Topology

Numbers = NDArray[np.int64]


class Part(NamedTuple):
    """Consecutive new tokens of a row: an ordinary row of attention.

    Args:
        row: which row of the step.
        start: position of the first.
        num_tokens: how many, at least one.
    """

    row: int
    start: int
    num_tokens: int

    @property
    def num_pairs(self) -> int:
        """(query, key) pairs that causal attention computes for it."""
        return self.num_tokens * self.start + self.num_tokens * (self.num_tokens + 1) // 2


@dataclass(frozen=True)
class Shares:
    """A step's rows, dealt out. "All rows" are those of all coordinates, coordinate after coordinate.

    Args:
        by_coordinate: for each PCP coordinate its parts, in order of row and position.
        own: this rank's coordinate.
        asking: coordinates whose queries this rank answers: neighbours, in order.
        row_starts: [rows of the step] int64, where a row's new tokens begin among those of the step.
        row_positions: [rows of the step] int64, the position of the first of them.
    """

    by_coordinate: Sequence[Sequence[Part]]
    own: int
    asking: Sequence[int]
    row_starts: Numbers
    row_positions: Numbers

    @classmethod
    def of(cls, rows: Sequence[Row], topology: Topology, rank: int, *, least_tokens: int) -> Self:
        """Deals the rows of a step out, as one rank sees it.

        Args:
            rows: those of the step.
            topology: the grid of ranks.
            rank: which of them.
            least_tokens: new tokens from which on a row is cut.
        """
        sizes = np.array([row.num_tokens for row in rows], np.int64)
        return cls(
            deal(rows, pcp_size=topology.pcp_size, least_tokens_to_split=least_tokens),
            topology.pcp_rank(rank),
            topology.asking_coordinates(rank),
            np.cumsum(sizes) - sizes,
            np.array([row.start for row in rows], np.int64),
        )

    @cached_property
    def parts(self) -> Numbers:
        """[parts, 3] int64: row, start and num_tokens of everybody's parts."""
        every = [part for parts in self.by_coordinate for part in parts]
        return np.array(every, np.int64).reshape(-1, 3)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Rows of each coordinate."""
        return tuple(sum(part.num_tokens for part in parts) for parts in self.by_coordinate)

    @cached_property
    def row_of(self) -> Numbers:
        """[all rows] int64: the row of the step that each is of."""
        return np.repeat(self.parts[:, 0], self.parts[:, 2])

    @cached_property
    def positions(self) -> Numbers:
        """[all rows] int64: the position of each in its sequence."""
        _, starts, sizes = self.parts.T
        first = np.cumsum(sizes) - sizes  # where each part begins
        positions: Numbers = np.arange(sizes.sum()) + np.repeat(starts - first, sizes)
        return positions

    @cached_property
    def places(self) -> Numbers:
        """[all rows] int64: which of the step's tokens each is."""
        places: Numbers = self.positions + (self.row_starts - self.row_positions)[self.row_of]
        return places

    @property
    def own_parts(self) -> slice:
        """Which of `parts` this rank works on."""
        return self._parts_of(self.own, self.own + 1)

    @property
    def asking_parts(self) -> slice:
        """Which of `parts` ask this rank."""
        return self._parts_of(self.asking[0], self.asking[-1] + 1)

    @property
    def own_rows(self) -> slice:
        """Which of all rows this rank works on."""
        return self.rows_of(self.own, self.own + 1)

    @property
    def asking_rows(self) -> slice:
        """Which of all rows ask this rank."""
        return self.rows_of(self.asking[0], self.asking[-1] + 1)

    def rows_of(self, first: int, end: int) -> slice:
        """Which of all rows are those of some neighbouring coordinates."""
        return slice(sum(self.sizes[:first]), sum(self.sizes[:end]))

    def _parts_of(self, first: int, end: int) -> slice:
        counts = [len(parts) for parts in self.by_coordinate]
        return slice(sum(counts[:first]), sum(counts[:end]))


def deal(rows: Sequence[Row], *, pcp_size: int, least_tokens_to_split: int) -> list[list[Part]]:
    """Deals the rows of a step out to PCP coordinates.

    Args:
        rows: those of the step.
        pcp_size: P.
        least_tokens_to_split: new tokens from which on a row is cut; shorter ones stay whole.

    Returns:
        For each coordinate its parts, in order of row and position; some may have none.
    """
    if pcp_size == 1:  # as below, in a hundredth of the time, in each step of every decode
        return [[Part(i, row.start, row.num_tokens) for i, row in enumerate(rows)]]
    shares: list[list[Part]] = [[] for _ in range(pcp_size)]
    tokens, pairs = [0] * pcp_size, [0] * pcp_size
    for number, row in enumerate(rows):
        if row.num_tokens >= least_tokens_to_split:
            chunks = [_joined(its) for its in zigzag(row.num_tokens, pcp_size=pcp_size)]
        else:
            chunks = [[] for _ in range(pcp_size)]
            idlest = min(range(pcp_size), key=lambda p: (tokens[p], pairs[p]))
            chunks[idlest] = [Chunk(0, row.num_tokens)]
        for coordinate, its in enumerate(chunks):
            for chunk in its:
                part = Part(number, row.start + chunk.offset, chunk.length)
                shares[coordinate].append(part)
                tokens[coordinate] += part.num_tokens
                pairs[coordinate] += part.num_pairs
    return shares


def _joined(chunks: Sequence[Chunk]) -> list[Chunk]:
    """Chunks of which one begins where another ends are one row: those of the last coordinate are."""
    joined: list[Chunk] = []
    for chunk in chunks:
        if joined and joined[-1].offset + joined[-1].length == chunk.offset:
            joined[-1] = Chunk(joined[-1].offset, joined[-1].length + chunk.length)
        else:
            joined.append(chunk)
    return joined
