"""Pools of units: order of reuse, sharing, keys, and checks that notice."""

from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvspan.cache.pool import BlockPools


def test_units_of_a_pool_come_in_order_and_carry_its_base() -> None:
    pools = BlockPools(num_pools=2, blocks_per_pool=3)
    assert (pools.num_units, pools.num_free, pools.num_free_by_pool) == (6, 6, [3, 3])
    assert [pools.take(1) for _ in range(3)] == [3, 4, 5]
    assert pools.num_free_by_pool == [3, 0]
    assert [pools.pool_of(unit) for unit in (2, 3)] == [0, 1]


def test_free_units_are_reused_least_recently_used_first() -> None:
    pools = BlockPools(num_pools=1, blocks_per_pool=3)
    for name in (b"a", b"b", b"c"):
        pools.label(pools.take(0), name)
    for unit in (1, 2, 0):
        pools.release(unit)
    assert [pools.take(0) for _ in range(3)] == [1, 2, 0]
    assert [pools.find(name) for name in (b"a", b"b", b"c")] == [None] * 3


def test_what_nobody_can_ask_for_is_reused_before_what_may_be_hit() -> None:
    pools = BlockPools(num_pools=1, blocks_per_pool=2)
    known, unknown = pools.take(0), pools.take(0)
    pools.label(known, b"key")
    pools.release(known)
    pools.release(unknown)
    assert pools.take(0) == unknown
    assert pools.find(b"key") == known


def test_a_freed_unit_keeps_its_key_and_comes_back_to_life() -> None:
    pools = BlockPools(num_pools=1, blocks_per_pool=2)
    unit = pools.take(0)
    pools.label(unit, b"key")
    pools.release(unit)
    assert pools.find(b"key") == unit
    assert pools.is_free(unit)
    pools.share(unit)
    assert not pools.is_free(unit)
    assert pools.take(0) != unit
    assert pools.num_free == 0


def test_a_shared_unit_is_free_when_its_last_holder_goes() -> None:
    pools = BlockPools(num_pools=1, blocks_per_pool=1)
    unit = pools.take(0)
    pools.share(unit)
    pools.release(unit)
    assert not pools.is_free(unit)
    pools.release(unit)
    assert pools.is_free(unit)
    with pytest.raises(AssertionError, match="released by nobody"):
        pools.release(unit)


def test_the_first_unit_under_a_key_stays() -> None:
    pools = BlockPools(num_pools=1, blocks_per_pool=2)
    first, second = pools.take(0), pools.take(0)
    pools.label(first, b"key")
    pools.label(second, b"key")
    assert pools.find(b"key") == first
    assert pools.key_of(second) is None
    pools.check({first: 1, second: 1})


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (lambda p: p._num_holders.__setitem__(0, 2), "other holders"),
        (lambda p: p._free[0].__setitem__(0, None), "both held and free"),
        (lambda p: p._free[1].__setitem__(1, p._free[0].pop(1)), "strayed"),
        (lambda p: p._free[0].pop(1), "neither held nor free"),
        (lambda p: p._key_of.pop(0), "both ways"),
    ],
    ids=["count", "held and free", "wrong pool", "lost", "key"],
)
def test_the_check_notices(spoil: Callable[[BlockPools], object], complaint: str) -> None:
    pools = BlockPools(num_pools=2, blocks_per_pool=2)
    pools.label(pools.take(0), b"key")
    pools.check({0: 1})
    spoil(pools)
    with pytest.raises(AssertionError, match=complaint):
        pools.check({0: 1})


class PoolMachine(RuleBasedStateMachine):
    """Pools against a twin: a list of free units in order of reuse, and a dict of keys."""

    def __init__(self) -> None:
        super().__init__()
        self.pools = BlockPools(num_pools=2, blocks_per_pool=4)
        self.free = [list(range(4)), list(range(4, 8))]
        self.held: Counter[int] = Counter()
        self.keys: dict[bytes, int] = {}

    @rule(pool=st.integers(0, 1))
    def take(self, pool: int) -> None:
        if self.free[pool]:
            unit = self.free[pool].pop(0)
            self.keys = {key: u for key, u in self.keys.items() if u != unit}
            assert self.pools.take(pool) == unit
            self.held[unit] = 1

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        unit = data.draw(st.sampled_from(sorted(self.held)))
        self.pools.release(unit)
        self.held[unit] -= 1
        if not self.held[unit]:
            del self.held[unit]
            known = unit in self.keys.values()
            self.free[unit // 4].insert(len(self.free[unit // 4]) if known else 0, unit)

    @precondition(lambda self: set(self.held) - set(self.keys.values()))
    @rule(data=st.data(), key=st.binary(min_size=1, max_size=1))
    def label(self, data: st.DataObject, key: bytes) -> None:
        unit = data.draw(st.sampled_from(sorted(set(self.held) - set(self.keys.values()))))
        self.pools.label(unit, key)
        self.keys.setdefault(key, unit)

    @precondition(lambda self: self.keys)
    @rule(data=st.data())
    def hit(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.keys)))
        unit = self.pools.find(key)
        assert unit == self.keys[key]
        self.pools.share(unit)
        if not self.held[unit]:
            self.free[unit // 4].remove(unit)
        self.held[unit] += 1

    @invariant()
    def agree(self) -> None:
        self.pools.check(self.held)
        assert self.pools.num_free_by_pool == [len(units) for units in self.free]
        assert {key: self.pools.find(key) for key in self.keys} == self.keys


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
