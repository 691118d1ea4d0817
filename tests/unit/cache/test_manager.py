"""Hits, placement, growth and freeing, with every invariant recounted."""

from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvspan.cache.manager import Allocation, CacheManager
from kvspan.cache.prefix import KeySpace, UnitKeys
from kvspan.layout import CacheLayout


def layout_of(*, block_size: int, dcp_size: int, interleave: int | None = None) -> CacheLayout:
    return CacheLayout(block_size=block_size, dcp_size=dcp_size, interleave=interleave or block_size)


def keys_of(layout: CacheLayout, tokens: list[int]) -> UnitKeys:
    return KeySpace(layout=layout, kv_dtype="bf16", model="tiny").keys(tokens)


class Desk:
    """Requests given as tokens, computed as soon as they are allocated."""

    def __init__(self, cache: CacheManager) -> None:
        self.cache = cache
        self._next_id = 0

    def serve(self, tokens: list[int]) -> tuple[int, Allocation]:
        """Allocates and computes all of a prompt."""
        request_id, self._next_id = self._next_id, self._next_id + 1
        held = self.cache.allocate(
            request_id,
            keys_of(self.cache.layout, tokens),
            num_tokens=len(tokens) + 1,
            max_hit_tokens=len(tokens) - 1,
        )
        assert held is not None
        self.cache.register(request_id, num_computed_tokens=len(tokens))
        self.cache.check()
        return request_id, held


@pytest.mark.parametrize(
    ("interleave", "num_tokens", "num_hit_tokens"),
    [(16, 100, 96), (1, 100, 0), (8, 100, 0), (1, 300, 256), (16, 32, 16), (16, 33, 32), (16, 16, 0)],
)
def test_a_prompt_sent_twice_hits_its_full_units(
    interleave: int, num_tokens: int, num_hit_tokens: int
) -> None:
    layout = layout_of(block_size=16, dcp_size=8, interleave=interleave)
    desk = Desk(CacheManager(layout, blocks_per_pool=8))
    prompt = list(range(num_tokens))
    _, first = desk.serve(prompt)
    _, second = desk.serve(prompt)
    assert (first.num_hit_tokens, second.num_hit_tokens) == (0, num_hit_tokens)
    shared = num_hit_tokens // layout.unit_tokens
    assert second.units[:shared] == first.units[:shared]
    assert not set(second.units[shared:]) & set(first.units)


def test_a_hit_survives_that_the_first_request_is_gone() -> None:
    desk = Desk(CacheManager(layout_of(block_size=4, dcp_size=3), blocks_per_pool=4))
    first_id, first = desk.serve(list(range(18)))
    units = list(first.units)
    desk.cache.free(first_id)
    assert desk.cache.free_tokens == desk.cache.total_tokens
    _, second = desk.serve(list(range(18)))
    assert second.num_hit_tokens == 16
    assert second.units[:4] == units[:4]


def test_the_tail_of_a_chain_is_lost_before_its_head() -> None:
    layout = layout_of(block_size=4, dcp_size=1)
    desk = Desk(CacheManager(layout, blocks_per_pool=6))
    first_id, _ = desk.serve(list(range(16)))  # 4 full units and one for the token to come
    desk.cache.free(first_id)
    other_id, _ = desk.serve([99] * 13)  # takes 4 of 6: two of no use, then the chain's last two
    desk.cache.free(other_id)
    _, again = desk.serve(list(range(16)))
    assert again.num_hit_tokens == 8


def test_a_chain_goes_on_through_output_tokens() -> None:
    layout = layout_of(block_size=4, dcp_size=2)
    cache = CacheManager(layout, blocks_per_pool=8)
    tokens = [1, 2, 3, 4, 5]
    keys = keys_of(layout, tokens)
    assert cache.allocate(0, keys, num_tokens=6, max_hit_tokens=4) is not None
    for token in range(6, 14):
        cache.register(0, num_computed_tokens=len(tokens))
        tokens.append(token)
        assert cache.grow(0, num_tokens=len(tokens))
    cache.register(0, num_computed_tokens=12)
    cache.free(0)
    assert Desk(cache).serve(list(range(1, 14)))[1].num_hit_tokens == 12


def test_without_prefix_caching_nothing_is_hit_and_no_key_is_asked_for() -> None:
    class NoKeys:
        def key(self, index: int) -> bytes:
            raise AssertionError(f"key {index} was asked for")

    cache = CacheManager(
        layout_of(block_size=4, dcp_size=2), blocks_per_pool=8, enable_prefix_caching=False
    )
    for request_id in range(2):
        held = cache.allocate(request_id, NoKeys(), num_tokens=9, max_hit_tokens=8)
        assert held is not None
        cache.register(request_id, num_computed_tokens=8)
        assert held.num_hit_tokens == 0
        cache.check()


def test_equal_prompts_computed_side_by_side_both_stay_valid() -> None:
    layout = layout_of(block_size=4, dcp_size=2)
    cache = CacheManager(layout, blocks_per_pool=8)
    prompt = list(range(9))
    a = cache.allocate(0, keys_of(layout, prompt), num_tokens=10, max_hit_tokens=8)
    b = cache.allocate(1, keys_of(layout, prompt), num_tokens=10, max_hit_tokens=8)
    assert a is not None
    assert b is not None
    cache.register(0, num_computed_tokens=9)
    cache.register(1, num_computed_tokens=9)
    cache.check()
    assert not set(a.units) & set(b.units)
    assert Desk(cache).cache.allocate(
        2, keys_of(layout, prompt), num_tokens=10, max_hit_tokens=8
    ).units[:2] == a.units[:2]  # fmt: skip


def test_a_request_that_has_not_begun_hits_what_was_computed_meanwhile() -> None:
    layout = layout_of(block_size=4, dcp_size=2)
    cache = CacheManager(layout, blocks_per_pool=8)
    prompt = list(range(13))
    for request_id in range(2):
        assert cache.allocate(request_id, keys_of(layout, prompt), num_tokens=14, max_hit_tokens=12)
    assert cache.look_again(1, max_hit_tokens=12).num_hit_tokens == 0
    cache.register(0, num_computed_tokens=13)
    free_tokens = cache.free_tokens
    again = cache.look_again(1, max_hit_tokens=12)
    assert again.num_hit_tokens == 12
    assert len(again.units) == layout.num_units(14)
    assert cache.free_tokens == free_tokens + 12
    assert cache.look_again(1, max_hit_tokens=12) is again
    cache.check()


def test_allocation_is_all_or_nothing() -> None:
    layout = layout_of(block_size=4, dcp_size=2)
    cache = CacheManager(layout, blocks_per_pool=3)  # 24 tokens
    assert cache.allocate(0, keys_of(layout, [0] * 16), num_tokens=16, max_hit_tokens=15)
    free = cache.free_tokens
    assert cache.allocate(1, keys_of(layout, [1] * 12), num_tokens=12, max_hit_tokens=11) is None
    assert cache.free_tokens == free == 8
    assert not cache.grow(0, num_tokens=25)
    assert cache.free_tokens == free
    assert cache.grow(0, num_tokens=24)
    assert (cache.free_tokens, cache.usage) == (0, 1.0)
    cache.check()


def test_a_hit_on_free_units_counts_as_taking_them() -> None:
    layout = layout_of(block_size=4, dcp_size=1)
    desk = Desk(CacheManager(layout, blocks_per_pool=4))
    first_id, _ = desk.serve(list(range(12)))
    desk.cache.free(first_id)
    keys = keys_of(layout, list(range(17)))
    assert desk.cache.allocate(7, keys, num_tokens=17, max_hit_tokens=16) is None
    desk.cache.check()
    held = desk.cache.allocate(7, keys, num_tokens=16, max_hit_tokens=15)
    assert held is not None
    assert held.num_hit_tokens == 12


def test_the_whole_groups_pools_bound_a_request() -> None:
    cache = CacheManager(layout_of(block_size=16, dcp_size=8), blocks_per_pool=4)  # 64 tokens a rank
    assert cache.total_tokens == 512
    assert cache.fits(210)
    assert cache.fits(512)
    assert not cache.fits(513)
    narrow = CacheManager(layout_of(block_size=16, dcp_size=8, interleave=1), blocks_per_pool=4)
    assert (narrow.total_tokens, narrow.fits(512), narrow.fits(513)) == (512, True, False)


def test_short_requests_do_not_all_lie_on_one_rank() -> None:
    desk = Desk(CacheManager(layout_of(block_size=16, dcp_size=4), blocks_per_pool=8))
    first_pools = [desk.serve([i] * 10)[1].units[0] // 8 for i in range(8)]
    assert sorted(first_pools) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_growth_goes_on_round_the_ranks_after_a_hit() -> None:
    layout = layout_of(block_size=4, dcp_size=3)
    desk = Desk(CacheManager(layout, blocks_per_pool=8))
    desk.serve(list(range(9)))
    request_id, second = desk.serve(list(range(9)))
    assert [unit // 8 for unit in second.units] == [0, 1, 2]
    assert desk.cache.grow(request_id, num_tokens=20)
    assert [unit // 8 for unit in second.units] == [0, 1, 2, 0, 1]


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (lambda held: held.units.append(held.units[0]), "other holders"),
        (lambda held: held.units.pop(), "other holders"),
        (lambda held: setattr(held, "num_keyed_units", 0), "wrong key"),
        (lambda held: setattr(held, "num_keyed_units", 9), "keys too many"),
        (lambda held: held.units.reverse(), "wrong key"),
    ],
)
def test_the_check_notices(spoil: Callable[[Allocation], object], complaint: str) -> None:
    desk = Desk(CacheManager(layout_of(block_size=4, dcp_size=2), blocks_per_pool=8))
    _, held = desk.serve(list(range(9)))
    spoil(held)
    with pytest.raises(AssertionError, match=complaint):
        desk.cache.check()


class ManagerMachine(RuleBasedStateMachine):
    """Random requests over few tokens, so that prefixes meet; content is followed unit by unit."""

    layout = layout_of(block_size=2, dcp_size=3)

    def __init__(self) -> None:
        super().__init__()
        self.cache = CacheManager(self.layout, blocks_per_pool=3)
        self.tokens: dict[int, list[int]] = {}
        self.held: dict[int, Allocation] = {}
        self.computed: dict[int, int] = {}
        self.content: dict[int, tuple[int, ...]] = {}  # by unit: all tokens up to its end
        self.next_id = 0

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=12))
    def allocate(self, tokens: list[int]) -> None:
        before, request_id = self.cache.free_tokens, self.next_id
        self.next_id += 1
        held = self.cache.allocate(
            request_id,
            keys_of(self.layout, tokens),
            num_tokens=len(tokens) + 1,
            max_hit_tokens=len(tokens) - 1,
        )
        if held is None:
            assert self.cache.free_tokens == before
            assert self.layout.num_units(len(tokens) + 1) * self.layout.unit_tokens > before
            return
        assert held.num_hit_tokens < len(tokens)
        for i in range(held.num_hit_tokens // self.layout.unit_tokens):
            assert self.content[held.units[i]] == tuple(tokens[: (i + 1) * self.layout.unit_tokens])
        self.tokens[request_id], self.held[request_id] = tokens, held
        self.computed[request_id] = held.num_hit_tokens

    @precondition(lambda self: self.held)
    @rule(data=st.data(), token=st.integers(0, 1))
    def compute(self, data: st.DataObject, token: int) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.held)))
        tokens, held = self.tokens[request_id], self.held[request_id]
        size = self.layout.unit_tokens
        for i in range(self.computed[request_id] // size, len(tokens) // size):
            self.content[held.units[i]] = tuple(tokens[: (i + 1) * size])
        self.computed[request_id] = len(tokens)
        self.cache.register(request_id, num_computed_tokens=len(tokens))
        if self.cache.grow(request_id, num_tokens=len(tokens) + 2):
            tokens.append(token)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.held)))
        self.cache.free(request_id)
        del self.held[request_id], self.tokens[request_id], self.computed[request_id]

    @invariant()
    def nothing_is_lost(self) -> None:
        self.cache.check()
        held = {unit for held in self.held.values() for unit in held.units}
        assert self.cache.free_tokens == self.cache.total_tokens - len(held) * self.layout.unit_tokens
        assert self.cache.holders == set(self.held)


TestManagerMachine = ManagerMachine.TestCase
TestManagerMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
