"""Which rows of a step each rank works on. Pure; knows no tensors and no groups.

    a long row (P = 2)    0 0 0 1 1 1 1 1 1 0 0 0    2P chunks, dealt so that causal work balances
    decode, short rows    whole, to the coordinate that has least to do so far
    a row with a home     whole, to the home that has all its keys; nobody else attends for it

Where rows are shared out (P > 1) a home is a PCP coordinate, and its rows stay there through the whole
network. Where they are not, it may be a rank of the DCP group (`num_homes`): all ranks take all rows
through the network, and the home alone has to do with its rows in attention. Prompts that would be much
work for one home are shared out all the same, since a step takes as long as its busiest rank needs: by
rows where homes are coordinates, by heads where they are ranks. The home keeps the keys. Of a few
rows that decode nobody picks out their own: those of others see no key, and add nothing. And where ranks
meet for a row anyway, and few decode, all rows travel.

Who has which row follows from how many there are:

    split_tokens           new tokens from which on a row is cut for coordinates
    meet_tokens            ... and from which on coordinates meet for one of a home; of ranks that are
                           homes it is PAIRS_WORTH_MEETING
    few_rows               that decode: where ranks meet anyway, no row stays at its home
    ROWS_WORTH_SHARING     that decode: ranks that are homes pick out their own; new tokens: they leave
                           heads of a prompt to others
    team_rows              of a coordinate: all multiply the rows of all, each by a part of the weights

Every rank computes the shares of all others from the same global values, and so knows how much each of
them brings to a collective. P = 1 is one coordinate that has everything.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from kvspan.cache.placement import home_of
from kvspan.config.resolved import Resolved
from kvspan.cost.prefill import PrefillRule
from kvspan.layout import Chunk, zigzag
from kvspan.step import Row
from kvspan.topology import Span, Topology

Numbers = NDArray[np.int64]


ROWS_WORTH_SHARING = 16
"""New tokens of a prompt from which on a rank that is a home leaves heads to others, if that costs no
collective, and rows that decode from which on it picks out its own: fewer are bound by reading
weights."""
FEW_ROWS = Span(1, ROWS_WORTH_SHARING)
"""That decode where ranks are homes: with fewer than are worth sharing, all travel if one does."""
PAIRS_WORTH_MEETING = 1 << 21
"""(query, key) pairs of a row beyond which that is worth a collective. A prompt of 2,048 tokens has no
more, so that traffic of short requests makes none."""


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


class Parts:
    """Some parts, and their tokens one after another.

    Args:
        parts: in order.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = parts
        self._array = np.array(parts, np.int64).reshape(-1, 3)

    @cached_property
    def row(self) -> Numbers:
        """[tokens] int64: the row of the step that each token is of."""
        return np.repeat(self._array[:, 0], self._array[:, 2])

    @cached_property
    def position(self) -> Numbers:
        """[tokens] int64: the position of each in its sequence."""
        _, starts, sizes = self._array.T
        first = np.cumsum(sizes) - sizes  # where each part begins
        position: Numbers = np.arange(sizes.sum()) + np.repeat(starts - first, sizes)
        return position

    @property
    def num_tokens(self) -> int:
        """Tokens of all parts."""
        return len(self.row)


@dataclass(frozen=True)
class Shares:
    """A step's rows, dealt out.

    Args:
        travelling: for each coordinate its parts of rows whose keys reach all of them.
        staying: for each home its parts of rows whose keys stay there.
        own: this rank's coordinate.
        home: this rank's.
        is_spread: whether ranks keep different keys (W > 1), so that queries travel too.
        row_offsets: [rows of the step] int64: added to a position, its place among the step's tokens.
        team: rows that each coordinate brings to linear layers that they share out (`layers.team`);
            empty = each works alone.
    """

    travelling: Sequence[Sequence[Part]]
    staying: Sequence[Sequence[Part]]
    own: int
    home: int
    is_spread: bool
    row_offsets: Numbers
    team: tuple[int, ...] = ()

    @classmethod
    def of(
        cls,
        rows: Sequence[Row],
        homes: Sequence[int | None],
        topology: Topology,
        rank: int,
        *,
        num_homes: int,
        least_tokens: int,
        team_rows: Span,
    ) -> Self:
        """Deals the rows of a step out, as one rank sees it.

        Args:
            rows: those of the step.
            homes: that of each which has all its keys; None = several have some.
            topology: the grid of ranks.
            rank: which of them.
            num_homes: P, or W where the ranks of a DCP group are homes, or 1 where nothing is.
            least_tokens: new tokens from which on a row is cut.
            team_rows: rows of the fullest coordinate with which they multiply all rows as a team.
        """
        sizes = np.array([row.num_tokens for row in rows], np.int64)
        starts = np.array([row.start for row in rows], np.int64)
        pcp_size = topology.pcp_size
        travelling, staying = deal(
            rows, homes, pcp_size=pcp_size, num_homes=num_homes, least_tokens_to_split=least_tokens
        )
        return cls(
            travelling,
            staying,
            topology.pcp_rank(rank),
            topology.dcp_rank(rank) % num_homes,
            topology.dcp_size > 1,
            np.cumsum(sizes) - sizes - starts,
            _team(rows, travelling, staying, team_rows),
        )

    @cached_property
    def own_parts(self) -> Parts:
        """What this rank attends for: first what travels."""
        return Parts([*self.travelling[self.own], *self.local_parts])

    @cached_property
    def local_parts(self) -> Sequence[Part]:
        """Parts of rows with a home that this rank attends for.

        Of ranks that are homes, those of all homes where nothing else is there and they are few tokens
        that decode: rows of another home see no key here and add nothing. Such steps have one shape,
        whoever has which row, and so are played (`worker.runner`).
        """
        every = sorted(part for its in self.staying for part in its)
        is_alone = len(self.travelling) == 1 and not self.travelling[0]
        if is_alone and len(every) < ROWS_WORTH_SHARING and all(p.num_tokens == 1 for p in every):
            return every
        return self.staying[self.home]

    @cached_property
    def network_parts(self) -> Parts:
        """What it takes through the network: of one coordinate everything, in the order of the step."""
        if len(self.travelling) > 1 or not any(self.staying):
            return self.own_parts
        return Parts(sorted(part for its in (*self.travelling, *self.staying) for part in its))

    @cached_property
    def keyed_parts(self) -> Parts:
        """Whose keys come here: everybody's that travel, and then this rank's that stay."""
        if len(self.travelling) == 1:
            return self.own_parts
        return Parts([*(p for its in self.travelling for p in its), *self.local_parts])

    @property
    def num_idle(self) -> int:
        """Rows of nobody that this rank takes through the network after its own."""
        return self.team[self.own] - self.own_parts.num_tokens if self.team else 0

    @property
    def row_sizes(self) -> tuple[int, ...]:
        """Tokens of each coordinate whose keys travel."""
        return tuple(sum(part.num_tokens for part in its) for its in self.travelling)

    def parts_of(self, coordinate: int) -> Parts:
        """What one of several coordinates works on, in its order."""
        return Parts([*self.travelling[coordinate], *self.staying[coordinate]])

    def places(self, parts: Parts) -> Numbers:
        """[tokens] int64: which of the step's tokens those of some parts are."""
        places: Numbers = parts.position + self.row_offsets[parts.row]
        return places


@dataclass(frozen=True, slots=True, kw_only=True)
class Homes:
    """Says which home attends for a row alone, and of which rows several ranks do.

    Args:
        num_pools: of the DCP group.
        num_homes: into which it is divided.
        pcp_size: P; 1 where ranks are homes.
        rule: which rows have their keys gathered, and so attend head by head.
        split_tokens: new tokens from which on coordinates share out a row ...
        meet_tokens: ... and from which on they meet for it, though one has all its keys.
        few_rows: that decode, of a coordinate, with which all rows travel where ranks meet for one.
    """

    num_pools: int
    num_homes: int
    pcp_size: int
    rule: PrefillRule
    split_tokens: int
    meet_tokens: int
    few_rows: Span

    @classmethod
    def of(cls, resolved: Resolved, rule: PrefillRule) -> Self:
        """Those of what runs."""
        return cls(
            num_pools=resolved.cache_layout.num_pools,
            num_homes=resolved.num_homes,
            pcp_size=resolved.pcp_size,
            rule=rule,
            split_tokens=resolved.split_tokens,
            meet_tokens=resolved.meet_tokens,
            few_rows=FEW_ROWS if resolved.pcp_size == 1 else resolved.team_rows,
        )

    def of_rows(self, rows: Sequence[Row], pools: Sequence[Collection[int]]) -> list[int | None]:
        """The home that attends for each row alone; None = several ranks do.

        Args:
            rows: those of the step.
            pools: of each, those that have any of its request's units.
        """
        homes = [home_of(its, num_pools=self.num_pools, num_homes=self.num_homes) for its in pools]
        if self.num_homes == 1:
            return homes
        if None in homes and self._few_decode(rows):
            # That is no collective more, no home is busier than the other, and of those steps in which
            # all decode, all have one shape, and so are played.
            return [None] * len(rows)
        by_all = self._shared_by_coordinates if self.pcp_size > 1 else self._shared_by_ranks
        return [
            None if is_shared else home
            for is_shared, home in zip(by_all(rows, homes), homes, strict=True)
        ]

    def _few_decode(self, rows: Sequence[Row]) -> bool:
        """Whether no coordinate has many rows that decode."""
        num_decode = sum(row.num_tokens == 1 for row in rows)
        return -(-num_decode // self.pcp_size) in self.few_rows

    def _shared_by_coordinates(self, rows: Sequence[Row], homes: Sequence[int | None]) -> list[bool]:
        """Prompts over which others would wait; where all meet anyway, whatever is worth cutting."""
        meet = None in homes or any(row.num_tokens >= self.meet_tokens for row in rows)
        least = max(self.split_tokens, 2) if meet else self.meet_tokens
        return [row.num_tokens >= least for row in rows]

    def _shared_by_ranks(self, rows: Sequence[Row], _: Sequence[int | None]) -> list[bool]:
        sizes = np.array([row.num_tokens for row in rows], np.int64)
        starts = np.array([row.start for row in rows], np.int64)
        by_all: list[bool] = shared_out(sizes, starts, self.rule).tolist()
        return by_all


def shared_out(num_rows: Numbers, num_cached: Numbers, rule: PrefillRule) -> NDArray[np.bool_]:
    """Rows with a rank for a home that all ranks attend for nevertheless: it alone would take too long.

    Args:
        num_rows: [S], new tokens of each sequence.
        num_cached: [S], tokens before those.
        rule: which sequences have their keys gathered; one without context then needs no collective.

    Returns:
        [S] bool.
    """
    fresh = rule.gathers(num_rows, num_cached) & (num_cached == 0) & (num_rows >= ROWS_WORTH_SHARING)
    pairs = num_rows * num_cached + num_rows * num_rows // 2
    by_all: NDArray[np.bool_] = fresh | (pairs > PAIRS_WORTH_MEETING)
    return by_all


def all_decode(rows: Sequence[Row]) -> bool:
    """Whether each row is one token, as those of a decode are."""
    return all(row.num_tokens == 1 for row in rows)


def _team(
    rows: Sequence[Row],
    travelling: Sequence[Sequence[Part]],
    staying: Sequence[Sequence[Part]],
    paying: Span,
) -> tuple[int, ...]:
    """What each coordinate brings to a team; empty = each works alone.

    Where all rows decode it is equally many of each, so that steps have few shapes and each of them is
    soon recorded (`worker.runner`): the missing ones are idle.
    """
    if len(travelling) == 1:
        return ()
    sizes = [sum(p.num_tokens for p in (*a, *b)) for a, b in zip(travelling, staying, strict=True)]
    if all_decode(rows):
        sizes = [max(sizes)] * len(sizes)
    return tuple(sizes) if max(sizes) in paying else ()


def deal(
    rows: Sequence[Row],
    homes: Sequence[int | None],
    *,
    pcp_size: int,
    num_homes: int,
    least_tokens_to_split: int,
) -> tuple[list[list[Part]], list[list[Part]]]:
    """Deals the rows of a step out to PCP coordinates and homes.

    Args:
        rows: those of the step.
        homes: that of each which has all its keys; None = several have some.
        pcp_size: P.
        num_homes: P, or W where the ranks of a DCP group are homes, or 1 where nothing is.
        least_tokens_to_split: new tokens from which on a row is cut; shorter ones stay whole.

    Returns:
        For each coordinate its parts of rows without a home, and for each home its parts of those that
        have one, in order of row and position; it may have none.
    """
    travelling: list[list[Part]] = [[] for _ in range(pcp_size)]
    staying: list[list[Part]] = [[] for _ in range(num_homes)]
    if pcp_size == 1:  # as below, in a hundredth of the time, in each step of every decode
        for i, (row, home) in enumerate(zip(rows, homes, strict=True)):
            its = travelling[0] if home is None else staying[home]
            its.append(Part(i, row.start, row.num_tokens))
        return travelling, staying
    tokens, pairs = [0] * pcp_size, [0] * pcp_size

    def give(coordinate: int, number: int, chunk: Chunk, to: list[list[Part]]) -> None:
        part = Part(number, rows[number].start + chunk.offset, chunk.length)
        to[coordinate].append(part)
        tokens[coordinate] += part.num_tokens
        pairs[coordinate] += part.num_pairs

    for number, home in enumerate(homes):
        if home is not None:
            give(home, number, Chunk(0, rows[number].num_tokens), staying)
    for number, (row, home) in enumerate(zip(rows, homes, strict=True)):
        if home is not None:
            continue
        if row.num_tokens < least_tokens_to_split:
            idlest = min(range(pcp_size), key=lambda p: (tokens[p], pairs[p]))
            give(idlest, number, Chunk(0, row.num_tokens), travelling)
            continue
        for coordinate, chunks in enumerate(zigzag(row.num_tokens, pcp_size=pcp_size)):
            for chunk in _joined(chunks):
                give(coordinate, number, chunk, travelling)
    return travelling, staying


def _joined(chunks: Sequence[Chunk]) -> list[Chunk]:
    """Chunks of which one begins where another ends are one row: those of the last coordinate are."""
    joined: list[Chunk] = []
    for chunk in chunks:
        if joined and joined[-1].offset + joined[-1].length == chunk.offset:
            joined[-1] = Chunk(joined[-1].offset, joined[-1].length + chunk.length)
        else:
            joined.append(chunk)
    return joined
