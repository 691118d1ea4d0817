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
        self._blocks_per_pool = blocks_per_pool
        self._pool, self._lane = divmod(dcp_rank, layout.unit_span)
        self._blocks = Grown(np.zeros(0, np.int32))
        self._owned_before = Grown(np.zeros(1, np.int32))  # [num_units + 1]

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
        pools, blocks = np.divmod(np.asarray(units, np.int64), self._blocks_per_pool)
        mine = pools == self._pool
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
        block_size, interleave, span = self._sizes
        assert stop <= self.num_units * self._layout.unit_tokens, "a token without a unit"
        unit, offset = np.divmod(np.arange(start, stop), self._layout.unit_tokens)
        owned, next_owned = self._owned_before.values[unit], self._owned_before.values[unit + 1]
        run, place = np.divmod(offset, interleave)  # runs of a unit go round its ranks
        mine = (owned < next_owned) & (run % span == self._lane)
        slots = np.full(stop - start, NO_SLOT, np.int64)
        local_offset = run[mine] // span * interleave + place[mine]
        slots[mine] = self.blocks[owned[mine]].astype(np.int64) * block_size + local_offset
        return slots

    def local_bounds(self, bounds: NDArray[np.integer]) -> NDArray[np.int32]:
        """How many of this rank's keys lie among the first `bound` tokens.

        Args:
            bounds: [n] integers, numbers of tokens; within the units placed so far.

        Returns:
            [n] int32.
        """
        block_size, interleave, span = self._sizes
        unit, left = np.divmod(np.asarray(bounds, np.int64), self._layout.unit_tokens)
        assert np.all(unit + (left > 0) <= self.num_units), "a bound beyond the units"
        owned = self._owned_before.values[unit].astype(np.int64)
        in_part = self._owned_before.values[np.minimum(unit + 1, self.num_units)] - owned  # 0 or 1
        turns, rest = np.divmod(left, span * interleave)
        of_part = turns * interleave + np.clip(rest - self._lane * interleave, 0, interleave)
        local: NDArray[np.int64] = owned * block_size + in_part * of_part
        return local.astype(np.int32)

    @property
    def _sizes(self) -> tuple[int, int, int]:
        return self._layout.block_size, self._layout.interleave, self._layout.unit_span
