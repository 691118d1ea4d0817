"""Which rows of a step each PCP coordinate works on. Pure; knows no tensors and no groups.

    a long row (P = 2)    0 0 0 1 1 1 1 1 1 0 0 0    2P chunks, dealt so that causal work balances
    decode, short rows    whole, to the coordinate that has least to do so far

Every rank computes the shares of all coordinates from the same global values, and so knows how much
each of them brings to a collective. P = 1 is one coordinate that has everything.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np
from numpy.typing import NDArray

from kvspan.layout import Chunk, zigzag
from kvspan.step import Row
from kvspan.topology import Topology


@dataclass(frozen=True, slots=True)
class Part:
    """Consecutive new tokens of a row: an ordinary row of attention.

    Args:
        row: which row of the step.
        request_id: whose tokens.
        start: position of the first.
        num_tokens: how many, at least one.
    """

    row: int
    request_id: int
    start: int
    num_tokens: int

    @property
    def span(self) -> NDArray[np.int64]:
        """[num_tokens]: positions of its tokens."""
        return np.arange(self.start, self.start + self.num_tokens)

    @property
    def num_pairs(self) -> int:
        """(query, key) pairs that causal attention computes for it."""
        return self.num_tokens * self.start + self.num_tokens * (self.num_tokens + 1) // 2


@dataclass(frozen=True)
class Shares:
    """A step's rows, dealt out.

    Args:
        by_coordinate: for each PCP coordinate its parts, in order of row and position.
        own: this rank's coordinate.
        asking: coordinates whose queries this rank answers, in order.
    """

    by_coordinate: Sequence[Sequence[Part]]
    own: int
    asking: Sequence[int]

    @classmethod
    def of(cls, rows: Sequence[Row], topology: Topology, rank: int, *, least_tokens: int) -> Self:
        """Deals the rows of a step out, as one rank sees it.

        Args:
            rows: those of the step.
            topology: the grid of ranks.
            rank: which of them.
            least_tokens: new tokens from which on a row is cut.
        """
        dealt = deal(rows, pcp_size=topology.pcp_size, least_tokens_to_split=least_tokens)
        return cls(dealt, topology.pcp_rank(rank), topology.asking_coordinates(rank))

    @property
    def own_parts(self) -> Sequence[Part]:
        """What this rank works on."""
        return self.by_coordinate[self.own]

    @property
    def asking_parts(self) -> list[Part]:
        """Whose queries this rank answers."""
        return [part for p in self.asking for part in self.by_coordinate[p]]

    @property
    def all_parts(self) -> list[Part]:
        """Everybody's."""
        return [part for parts in self.by_coordinate for part in parts]

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Rows of each coordinate."""
        return tuple(sum(part.num_tokens for part in parts) for parts in self.by_coordinate)

    @property
    def asking_sizes(self) -> tuple[int, ...]:
        """Rows of each coordinate that asks."""
        return tuple(self.sizes[p] for p in self.asking)

    def places(self, rows: Sequence[Row]) -> list[NDArray[np.int64]]:
        """For each coordinate, which rows of the step its rows are.

        Args:
            rows: those that were dealt out; the step's rows are their new tokens, one row after another.
        """
        ends = np.cumsum([row.num_tokens for row in rows], dtype=np.int64)
        starts = [end - row.num_tokens - row.start for row, end in zip(rows, ends, strict=True)]
        return [
            np.concatenate(
                [
                    np.zeros(0, np.int64),
                    *(starts[p.row] + np.arange(p.start, p.start + p.num_tokens) for p in parts),
                ]
            )
            for parts in self.by_coordinate
        ]


def deal(rows: Sequence[Row], *, pcp_size: int, least_tokens_to_split: int) -> list[list[Part]]:
    """Deals the rows of a step out to PCP coordinates.

    Args:
        rows: those of the step.
        pcp_size: P.
        least_tokens_to_split: new tokens from which on a row is cut; shorter ones stay whole.

    Returns:
        For each coordinate its parts, in order of row and position; some may have none.
    """
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
                part = Part(number, row.request_id, row.start + chunk.offset, chunk.length)
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
