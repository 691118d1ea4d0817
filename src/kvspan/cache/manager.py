"""Who holds which units: hits, placement, growth, freeing. All or nothing, and nothing by halves.

Of a request's units

    [0, hit)        hold tokens that were computed for others: shared, read, never written
    [hit, keyed)    hold tokens computed for this request, which others may hit
    [keyed, held)   are being filled, or are room for tokens to come

Knows units, keys and request ids. Knows no tokens, no tensors and no budget of a step.
"""

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

from kvspan.cache.placement import Placed, Placement, home_of, round_robin
from kvspan.cache.pool import BlockPools
from kvspan.cache.prefix import UnitKeys
from kvspan.layout import CacheLayout


@dataclass(slots=True)
class Allocation:
    """What one request holds.

    Args:
        units: its units in order, each `pool * blocks_per_pool + block`.
        keys: the keys of its units.
        num_hit_tokens: tokens at its beginning that need not be computed.
        num_keyed_units: units at its beginning that have been offered to others.
        placed: on which pools they lie.
        home: that has them all; None = several have some, or nothing is divided into homes.
    """

    units: list[int]
    keys: UnitKeys
    num_hit_tokens: int
    num_keyed_units: int
    placed: Placed
    home: int | None = None


class CacheManager:
    """The units of a DCP group, shared out among requests.

    Args:
        layout: how blocks and ranks share a sequence.
        blocks_per_pool: blocks of each rank.
        enable_prefix_caching: whether requests may share the units of equal prefixes.
        placement: where units go; with one pool (interleave < block size) there is no choice.
        num_homes: into which the group is divided; 1 = it is not.
        most_local_units: units of a request that its placement would keep on one home.
    """

    def __init__(
        self,
        layout: CacheLayout,
        *,
        blocks_per_pool: int,
        enable_prefix_caching: bool = True,
        placement: Placement = round_robin,
        num_homes: int = 1,
        most_local_units: int = 0,
    ) -> None:
        self.layout = layout
        self._enable_prefix_caching = enable_prefix_caching
        self._placement = placement
        self._num_homes, self._most_local_units = num_homes, most_local_units
        self.num_spills = 0
        """Requests that left their home before they were long, because it was full."""
        self._pools = BlockPools(num_pools=layout.num_pools, blocks_per_pool=blocks_per_pool)
        self._held: dict[int, Allocation] = {}

    @property
    def total_tokens(self) -> int:
        """Tokens that the whole group's pools hold."""
        return self._pools.num_units * self.layout.unit_tokens

    @property
    def free_tokens(self) -> int:
        """Tokens for which there is room; what is merely cached counts as room."""
        return self._pools.num_free * self.layout.unit_tokens

    @property
    def used_by_pool(self) -> tuple[int, ...]:
        """Units of each pool that requests hold."""
        size = self._pools.num_units // self.layout.num_pools
        return tuple(size - free for free in self._pools.num_free_by_pool)

    @property
    def blocks_per_pool(self) -> int:
        """Blocks of each pool."""
        return self._pools.num_units // self.layout.num_pools

    @property
    def known_units(self) -> Collection[int]:
        """Units whose content a prefix may hit, held or free."""
        return self._pools.known_units

    @property
    def usage(self) -> float:
        """Share of the pools that requests hold, 0..1."""
        return 1 - self._pools.num_free / self._pools.num_units

    @property
    def holders(self) -> frozenset[int]:
        """Requests that hold units."""
        return frozenset(self._held)

    def spans(self, held: Allocation) -> bool:
        """Whether ranks have to meet for a request: some of its tokens are on one, some on another."""
        return self.layout.dcp_size > 1 and held.home is None

    def fits(self, num_tokens: int) -> bool:
        """Whether a request of `num_tokens` tokens, output included, can ever be held.

        The whole group counts: no single rank's pool bounds a request.
        """
        return self.layout.num_units(num_tokens) <= self._pools.num_units

    def allocate(
        self, request_id: int, keys: UnitKeys, *, num_tokens: int, max_hit_tokens: int
    ) -> Allocation | None:
        """Units for a request that holds none, or None (and no change) when there is no room.

        Args:
            request_id: who.
            keys: of the request's units.
            num_tokens: tokens to have room for, hits included.
            max_hit_tokens: hits are whole units and cover at most this many tokens.
        """
        assert request_id not in self._held, f"request {request_id} already holds units"
        hits = self._hits(keys, max_hit_tokens)
        num_fresh = self.layout.num_units(num_tokens) - len(hits)
        if num_fresh > self._pools.num_free - sum(map(self._pools.is_free, hits)):
            return None
        for unit in hits:  # before any is taken, or a hit might be reused
            self._pools.share(unit)
        placed = Placed()
        placed.add([self._pools.pool_of(unit) for unit in hits])
        held = Allocation(hits, keys, len(hits) * self.layout.unit_tokens, len(hits), placed)
        held.home = self._home(placed)
        self._extend(held, num_fresh)
        self._held[request_id] = held
        return held

    def grow(self, request_id: int, *, num_tokens: int) -> bool:
        """Makes room for `num_tokens` tokens of a request in all.

        Returns:
            False, and nothing has changed, when there is none.
        """
        held = self._held[request_id]
        num_fresh = self.layout.num_units(num_tokens) - len(held.units)
        if num_fresh > self._pools.num_free:
            return False
        self._extend(held, num_fresh)
        return True

    def look_again(self, request_id: int, *, max_hit_tokens: int) -> Allocation:
        """Hits for a request of which nothing is computed, on what others have computed since.

        Returns:
            What it holds: another allocation if its hit is longer than before. Its room is the same.
        """
        held = self._held[request_id]
        if self._hit(held.keys, held.num_keyed_units, max_hit_tokens) is None:
            return held
        self.free(request_id)
        num_tokens = len(held.units) * self.layout.unit_tokens
        again = self.allocate(
            request_id, held.keys, num_tokens=num_tokens, max_hit_tokens=max_hit_tokens
        )
        assert again is not None, "what a request gave back is room enough for it"
        return again

    def register(self, request_id: int, *, num_computed_tokens: int) -> None:
        """Offers a request's full units to others.

        Args:
            request_id: who.
            num_computed_tokens: tokens at its beginning whose keys and values have been written.
        """
        held = self._held[request_id]
        num_full = num_computed_tokens // self.layout.unit_tokens
        if self._enable_prefix_caching:
            for index in range(held.num_keyed_units, num_full):
                self._pools.label(held.units[index], held.keys.key(index))
            held.num_keyed_units = max(held.num_keyed_units, num_full)

    def free(self, request_id: int) -> None:
        """Takes all units from a request, whatever ended it. What was registered may still be hit."""
        # A chain is of use only as far as it is unbroken: its tail is freed, so reused, first.
        for unit in reversed(self._held.pop(request_id).units):
            self._pools.release(unit)

    def check(self) -> None:
        """Recounts everything that must hold.

        Raises:
            AssertionError: says what does not add up.
        """
        self._pools.check(Counter(unit for held in self._held.values() for unit in held.units))
        for request_id, held in self._held.items():
            assert len(set(held.units)) == len(held.units), f"request {request_id} has a unit twice"
            assert held.num_keyed_units <= len(held.units), f"request {request_id} has keys too many"
            pools = {self._pools.pool_of(unit) for unit in held.units}
            assert held.placed.pools == pools, f"request {request_id} lies elsewhere"
            assert held.home == self._home(held.placed), f"request {request_id} has another home"
            for index, unit in enumerate(held.units):
                key = self._pools.key_of(unit)
                known = index < held.num_keyed_units and key == held.keys.key(index)
                assert key is None or known, f"request {request_id} has unit {index} by a wrong key"

    def _hits(self, keys: UnitKeys, max_hit_tokens: int) -> list[int]:
        """The longest run of units, from the first on, that are known under a request's keys."""
        hits: list[int] = []
        while (unit := self._hit(keys, len(hits), max_hit_tokens)) is not None:
            hits.append(unit)
        return hits

    def _hit(self, keys: UnitKeys, index: int, max_hit_tokens: int) -> int | None:
        """The unit that already holds what unit `index` of a request would hold."""
        in_reach = (index + 1) * self.layout.unit_tokens <= max_hit_tokens
        return self._pools.find(keys.key(index)) if self._enable_prefix_caching and in_reach else None

    def _extend(self, held: Allocation, num_units: int) -> None:
        """Places further units of a request, for which there is room."""
        if num_units <= 0:
            return
        free = self._pools.num_free_by_pool
        pools = self._placement(free, num_units=num_units, placed=held.placed)
        was_local = held.home is not None or not held.placed.num_units
        held.units.extend(self._pools.take(pool) for pool in pools)
        held.placed.add(pools)
        held.home = self._home(held.placed)
        is_short = len(held.units) <= self._most_local_units
        self.num_spills += was_local and is_short and held.home is None

    def _home(self, placed: Placed) -> int | None:
        return home_of(placed.pools, num_pools=self.layout.num_pools, num_homes=self._num_homes)
