"""One request's tokens on one rank: which blocks, which slots, how many keys. Knows no tensors.

A request's units come in order; some of them lie on this rank. Counting those before a unit gives
everything else: the rank's blocks in order are a dense table, of which only the last block in use may
be partial, so an ordinary paged kernel works on it with the local length. It holds for any placement.

    units (W=2, span 1)     0 on rank 1 | 1 on rank 1 | 2 on rank 0 | 3 on rank 1
    owned before, rank 1    0             1             2             2             3
    blocks of rank 1        [of unit 0, of unit 1, of unit 3]

Knows nothing of who decided the placement (`cache.manager`) or of other requests.
"""

from collections.abc import Sequence
from functools import cache

import numpy as np
from numpy.typing import NDArray

from kvspan.cache.grown import Grown
from kvspan.layout import NO_SLOT, CacheLayout


class RankTable:
    """A request's placement as one rank sees it; it grows at the end.

    Args:
        layout: how blocks and ranks share a sequence.
        dcp_rank: the rank that asks.
        blocks_per_pool: blocks of each pool, the base in which a unit's number is written.
    """

    def __init__(self, layout: CacheLayout, *, dcp_rank: int, blocks_per_pool: int) -> None:
        self._layout = layout
        self._unit_tokens = layout.unit_tokens
        self._block_size = layout.block_size
        self._blocks_per_pool = blocks_per_pool
        self._pool, lane = divmod(dcp_rank, layout.unit_span)
        self._places, self._num_before = _share_of_unit(layout, lane)
        self._blocks = Grown(np.zeros(0, np.int32))
        self._owned_before = Grown(np.zeros(1, np.int32))  # [num_units + 1]
        self._pools = Grown(np.zeros(0, np.int16))  # [num_units]
        self._used_pools: set[int] = set()

    @property
    def used_pools(self) -> frozenset[int]:
        """Pools that have any of its units."""
        return frozenset(self._used_pools)

    @property
    def num_units(self) -> int:
        """Units placed so far, wherever they lie."""
        return len(self._owned_before.values) - 1

    @property
    def blocks(self) -> NDArray[np.int32]:
        """[num_blocks] int32, this rank's blocks in order; a view, valid until the next `append`."""
        return self._blocks.values

    def append(self, units: Sequence[int]) -> None:
        """Places further units.

        Args:
            units: in order, each `pool * blocks_per_pool + block`.
        """
        if not units:
            return  # as in most steps, and an empty array costs as much as a full one
        pools, blocks = np.divmod(np.asarray(units, np.int64), self._blocks_per_pool)
        mine = pools == self._pool
        self._pools.extend(pools)
        self._used_pools.update(pools.tolist())
        self._blocks.extend(blocks[mine])
        self._owned_before.extend(self._owned_before.values[-1] + np.cumsum(mine))

    def slots(self, start: int, stop: int) -> NDArray[np.int64]:
        """Where this rank keeps each token of a range of positions.

        Args:
            start: first position.
            stop: one past the last; within the units placed so far.

        Returns:
            [stop - start] int64, block * B + offset, or `NO_SLOT` where another rank owns the token.
        """
        positions = np.arange(start, stop)
        return JoinedTables([self]).slots(np.zeros_like(positions), positions)

    def local_bounds(self, bounds: NDArray[np.integer]) -> NDArray[np.int32]:
        """How many of this rank's keys lie among the first `bound` tokens.

        Args:
            bounds: [n] integers, numbers of tokens; within the units placed so far.

        Returns:
            [n] int32.
        """
        which = np.zeros(len(bounds), np.int64)
        return JoinedTables([self]).local_bounds(which, bounds).astype(np.int32)

    def shares(self, num_tokens: int) -> NDArray[np.int64]:
        """How many of the first `num_tokens` tokens each rank of the group holds.

        Args:
            num_tokens: within the units placed so far.

        Returns:
            [W] int64, in order of `dcp_rank`; they sum to `num_tokens`.
        """
        layout = self._layout
        whole, left = divmod(num_tokens, layout.unit_tokens)
        units = np.bincount(self._pools.values[:whole], minlength=layout.num_pools)
        shares: NDArray[np.int64] = np.repeat(units * layout.block_size, layout.unit_span)
        if left:  # they lie in a unit that is there
            first = int(self._pools.values[whole]) * layout.unit_span
            for lane in range(layout.unit_span):
                shares[first + lane] += _share_of_unit(layout, lane)[1][left]
        return shares


class JoinedTables:
    """The tables of several requests on one rank, asked about all of them at once.

    Args:
        tables: of one layout and one rank; a later `append` to one of them is not seen here.

    Attributes:
        blocks: [n] int64, of all tables.
        block_starts: [tables + 1] int64, where each table's blocks begin among them, and the end.
    """

    def __init__(self, tables: Sequence[RankTable]) -> None:
        self._tables = tables
        owned = [table._owned_before.values for table in tables]
        blocks = [table.blocks for table in tables]
        self._owned_before = np.concatenate([np.zeros(0, np.int64), *owned])
        self._first_unit = np.cumsum([0, *map(len, owned)])
        self.blocks: NDArray[np.int64] = np.concatenate([np.zeros(0, np.int64), *blocks])
        self.block_starts: NDArray[np.int64] = np.cumsum([0, *map(len, blocks)], dtype=np.int64)

    def chosen(self, which: Sequence[int]) -> "JoinedTables":
        """Some of the tables, in this order: these themselves if they are all in theirs."""
        if list(which) == list(range(len(self._tables))):
            return self
        return JoinedTables([self._tables[i] for i in which])

    def slots(self, which: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Where this rank keeps tokens.

        Args:
            which: [n], the table of each.
            positions: [n], within the units placed so far.

        Returns:
            [n] int64, block * B + offset, or `NO_SLOT` where another rank owns the token.
        """
        if not len(positions):
            return np.zeros(0, np.int64)
        any_table = self._tables[0]
        unit, offset = np.divmod(positions, any_table._unit_tokens)
        at = self._first_unit[which] + unit
        assert (at + 1 < self._first_unit[which + 1]).all(), "a token without a unit"
        owned, place = self._owned_before[at], any_table._places[offset]
        mine = (owned < self._owned_before[at + 1]) & (place != NO_SLOT)
        slots = np.full(len(positions), NO_SLOT, np.int64)
        block = self.blocks[self.block_starts[which[mine]] + owned[mine]]
        slots[mine] = block * any_table._block_size + place[mine]
        return slots

    def local_bounds(self, which: NDArray[np.int64], bounds: NDArray[np.integer]) -> NDArray[np.int64]:
        """How many of this rank's keys lie among the first `bound` tokens of a table's sequence.

        Args:
            which: [n], the table of each bound.
            bounds: [n], numbers of tokens; within the units placed so far.

        Returns:
            [n] int64.
        """
        if not len(bounds):
            return np.zeros(0, np.int64)
        any_table = self._tables[0]
        unit, left = np.divmod(bounds, any_table._unit_tokens)
        end = self._first_unit[which + 1] - 1  # where a table's count of all its units stands
        at = self._first_unit[which] + unit
        assert (at + (left > 0) <= end).all(), "a bound beyond the units"
        owned = self._owned_before[at]
        is_mine = self._owned_before[np.minimum(at + 1, end)] - owned  # 0 or 1
        local: NDArray[np.int64] = owned * any_table._block_size + is_mine * any_table._num_before[left]
        return local


@cache
def _share_of_unit(layout: CacheLayout, lane: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """What one of a unit's ranks has of it: the same for every unit of a layout.

    Args:
        layout: how blocks and ranks share a sequence.
        lane: the rank's place among those that the unit lies on.

    Returns:
        places: [U] int64, for each token its place in the rank's block, or `NO_SLOT`.
        num_before: [U + 1] int64, for each token (and the end) how many of the rank's come before it.
    """
    run = np.arange(layout.unit_tokens) // layout.interleave  # runs go round the ranks
    mine = run % layout.unit_span == lane
    num_before = np.concatenate([np.zeros(1, np.int64), np.cumsum(mine, dtype=np.int64)])
    return np.where(mine, num_before[:-1], NO_SLOT), num_before
