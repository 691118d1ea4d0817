"""Units as numbers: how many hold each, which are free, under which key their content is known.

    held   by one request, or by several that share a prefix
    free   by none; its content and key stay until it is reused, so a hit can revive it

A pool reuses its free units least recently used first; those without a key, whose content nobody can
ask for, go before all others.

Knows units and keys. Knows no tokens, no requests and no placement.
"""

from collections import OrderedDict
from collections.abc import Collection, Mapping


class BlockPools:
    """Pools of units; unit `pool * blocks_per_pool + block` is block `block` of pool `pool`.

    Args:
        num_pools: pools to choose from.
        blocks_per_pool: blocks of each.
    """

    def __init__(self, *, num_pools: int, blocks_per_pool: int) -> None:
        self._blocks_per_pool = blocks_per_pool
        self._num_holders = [0] * (num_pools * blocks_per_pool)
        self._free = [
            OrderedDict.fromkeys(range(first, first + blocks_per_pool))
            for first in range(0, num_pools * blocks_per_pool, blocks_per_pool)
        ]
        self._unit_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}

    @property
    def num_units(self) -> int:
        """Units in all."""
        return len(self._num_holders)

    @property
    def num_free(self) -> int:
        """Units that nobody holds."""
        return sum(map(len, self._free))

    @property
    def num_free_by_pool(self) -> list[int]:
        """Free units of each pool."""
        return [len(units) for units in self._free]

    @property
    def known_units(self) -> Collection[int]:
        """Units whose content is known under a key, held or free."""
        return self._key_of.keys()

    def pool_of(self, unit: int) -> int:
        """The pool that a unit belongs to."""
        return unit // self._blocks_per_pool

    def is_free(self, unit: int) -> bool:
        """Whether nobody holds `unit`."""
        return self._num_holders[unit] == 0

    def find(self, key: bytes) -> int | None:
        """The unit whose content is known under `key`, held or free."""
        return self._unit_of.get(key)

    def key_of(self, unit: int) -> bytes | None:
        """The key under which a unit's content is known."""
        return self._key_of.get(unit)

    def take(self, pool: int) -> int:
        """A free unit of `pool` for one holder; what it held before is lost."""
        unit, _ = self._free[pool].popitem(last=False)
        if (key := self._key_of.pop(unit, None)) is not None:
            del self._unit_of[key]
        self._num_holders[unit] = 1
        return unit

    def share(self, unit: int) -> None:
        """One more holder for a unit, which may have been free."""
        if self.is_free(unit):
            del self._free[self.pool_of(unit)][unit]
        self._num_holders[unit] += 1

    def release(self, unit: int) -> None:
        """One holder less for a unit; the last one frees it."""
        assert self._num_holders[unit] > 0, f"unit {unit} is released by nobody"
        self._num_holders[unit] -= 1
        if self.is_free(unit):
            free = self._free[self.pool_of(unit)]
            free[unit] = None
            free.move_to_end(unit, last=unit in self._key_of)

    def label(self, unit: int, key: bytes) -> None:
        """Makes a held unit's content known under `key`, unless another unit already is."""
        assert not self.is_free(unit), f"free unit {unit} is given a key"
        assert unit not in self._key_of, f"unit {unit} is given a second key"
        if key not in self._unit_of:
            self._unit_of[key] = unit
            self._key_of[unit] = key

    def check(self, num_holders: Mapping[int, int]) -> None:
        """Recounts everything.

        Args:
            num_holders: how many requests hold each unit; one that is missing, none.

        Raises:
            AssertionError: says what does not add up.
        """
        counted = [num_holders.get(unit, 0) for unit in range(self.num_units)]
        wrong = [unit for unit, count in enumerate(counted) if count != self._num_holders[unit]]
        assert not wrong, f"units {wrong} have other holders than those counted"
        free = [unit for pool in self._free for unit in pool]
        assert len(free) == len(set(free)), "a unit is free twice"
        assert all(unit in self._free[self.pool_of(unit)] for unit in free), "a unit strayed"
        held = {unit for unit, count in enumerate(counted) if count}
        assert not held & set(free), f"units {held & set(free)} are both held and free"
        assert len(held) + len(free) == self.num_units, "a unit is neither held nor free"
        keys = {unit: key for key, unit in self._unit_of.items()}
        assert keys == self._key_of, "keys and units do not map both ways"
