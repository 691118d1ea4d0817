"""Scheduling against ranks that know nothing but Steps, and check each key that they read."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvspan.cache.manager import CacheManager
from kvspan.cache.placement import Elastic
from kvspan.cache.prefix import KeySpace
from kvspan.cache.table import RankTable
from kvspan.errors import ConfigError
from kvspan.layout import NO_SLOT, CacheLayout
from kvspan.request import SamplingParams
from kvspan.scheduler import Progress, Scheduled, Scheduler, SchedulerConfig, share_budget
from kvspan.sequence import SequenceState
from kvspan.step import (
    NewRequest,
    Row,
    Sampled,
    Step,
    StepResult,
    TokenLogprob,
    unpack_tokens,
)

VOCABULARY = 7


def identities(tokens: Sequence[int]) -> list[int]:
    """What the key of each position depends on: all tokens up to it."""
    found: list[int] = []
    for token in tokens:
        found.append(hash((found[-1] if found else 0, token)))
    return found


def continuation(prompt: Sequence[int], num_tokens: int) -> list[int]:
    """What the fake ranks sample after a prompt that runs alone."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(identities(tokens)[-1] % VOCABULARY)
    return tokens[len(prompt) :]


@dataclass
class Mirror:
    """What the ranks remember of a request."""

    tokens: list[int]
    num_prompt_tokens: int
    params: SamplingParams
    tables: list[RankTable]
    next_position: int | None = None  # None = no row in this life yet


@dataclass
class FakeRanks:
    """All ranks of a DCP group; the store has, for each slot, the identity of the key in it."""

    layout: CacheLayout
    blocks_per_pool: int
    mirrors: dict[int, Mirror] = field(default_factory=dict)
    num_computed: int = 0

    def __post_init__(self) -> None:
        self.stores: list[dict[int, int]] = [{} for _ in range(self.layout.dcp_size)]

    def run(self, step: Step) -> StepResult:
        for request_id in step.ended:
            del self.mirrors[request_id]  # an unknown one is an error
        for new in step.new:
            assert new.request_id not in self.mirrors
            self.mirrors[new.request_id] = self._mirror(new)
        assert len({row.request_id for row in step.rows}) == len(step.rows)
        for row in step.rows:
            self._write(row)
        return StepResult(step.step_id, tuple(self._read(row) for row in step.rows))

    def _mirror(self, new: NewRequest) -> Mirror:
        tables = [
            RankTable(self.layout, dcp_rank=r, blocks_per_pool=self.blocks_per_pool)
            for r in range(self.layout.dcp_size)
        ]
        tokens = unpack_tokens(new.tokens).tolist()
        return Mirror(tokens, new.num_prompt_tokens, new.params, tables)

    def _write(self, row: Row) -> None:
        mirror = self.mirrors[row.request_id]
        mirror.tokens.extend(row.new_tokens)
        if mirror.next_position is None:
            assert row.start % self.layout.unit_tokens == 0, "hits are whole units"
        else:
            assert row.start == mirror.next_position, "each token is computed once"
        stop = row.start + row.num_tokens
        mirror.next_position = stop
        self.num_computed += row.num_tokens
        assert row.num_tokens > 0
        assert row.sample == (stop == len(mirror.tokens))
        keys = identities(mirror.tokens)
        owners = np.zeros(row.num_tokens, np.int64)
        for table, store in zip(mirror.tables, self.stores, strict=True):
            table.append(row.new_units)
            slots = table.slots(row.start, stop)
            owners += slots != NO_SLOT
            store.update(
                (slot, keys[row.start + i]) for i, slot in enumerate(slots.tolist()) if slot >= 0
            )
        assert owners.tolist() == [1] * row.num_tokens

    def _read(self, row: Row) -> Sampled:
        mirror = self.mirrors[row.request_id]
        stop = row.start + row.num_tokens
        keys = identities(mirror.tokens)
        read: list[int] = []
        size = self.layout.block_size
        for table, store in zip(mirror.tables, self.stores, strict=True):
            num_local = int(table.local_bounds(np.array([stop]))[0])
            read += [store[table.blocks[i // size] * size + i % size] for i in range(num_local)]
        assert sorted(read) == sorted(keys[:stop]), f"request {row.request_id} reads others' keys"
        scored = range(row.start + 1, min(stop + 1, mirror.num_prompt_tokens))
        if mirror.params.prompt_logprobs is None:
            scored = range(0)
        return Sampled(
            row.request_id,
            keys[-1] % VOCABULARY if row.sample else None,
            prompt_logprobs=tuple((TokenLogprob(mirror.tokens[p], -1.0, 1),) for p in scored),
        )


class Bench:
    """An engine in small: scheduler, fake ranks, and the decision to finish."""

    def __init__(
        self,
        layout: CacheLayout,
        *,
        blocks_per_pool: int,
        enable_prefix_caching: bool = True,
        most_local_units: int = 0,
        **limits: int | bool,
    ) -> None:
        limits = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 4096} | limits
        self.config = SchedulerConfig(**limits)
        self.space = KeySpace(layout=layout, kv_dtype="bf16", model="tiny")
        num_homes = layout.num_pools if most_local_units else 1
        self.cache = CacheManager(
            layout,
            blocks_per_pool=blocks_per_pool,
            enable_prefix_caching=enable_prefix_caching,
            placement=Elastic(num_homes=num_homes, most_units=most_local_units),
            num_homes=num_homes,
            most_local_units=most_local_units,
        )
        self.scheduler = Scheduler(self.config, self.cache)
        self.ranks = FakeRanks(layout, blocks_per_pool)
        self.wanted: dict[int, int] = {}
        self.states: dict[int, SequenceState] = {}
        self.done: dict[int, SequenceState] = {}
        self.scored: dict[int, list[int]] = {}

    def add(self, prompt: Sequence[int], *, new: int = 1, **params: int) -> SequenceState:
        tokens = list(prompt)
        state = SequenceState(
            request_id=len(self.wanted),
            tokens=tokens,
            num_prompt_tokens=len(tokens),
            params=SamplingParams(**params),
            seed=0,
            keys=self.space.keys(tokens),
        )
        self.wanted[state.request_id] = new
        self.states[state.request_id] = state
        self.scored[state.request_id] = []
        self.scheduler.add(state)
        return state

    def abort(self, request_id: int) -> None:
        assert self.scheduler.abort(request_id)
        del self.states[request_id]

    def schedule(self) -> Scheduled | None:
        scheduled = self.scheduler.schedule()
        self.scheduler.check()
        if scheduled is not None:
            total = sum(row.num_tokens for row in scheduled.step.rows)
            assert 0 < total <= self.config.max_num_batched_tokens
        return scheduled

    def compute(self, step: Step) -> list[Progress]:
        progress = self.scheduler.update(self.ranks.run(step))
        self.scheduler.check()
        for entry in progress:
            state = entry.state
            self.scored[state.request_id] += [p[0].token_id for p in entry.sampled.prompt_logprobs]
            if len(state.output_tokens) == self.wanted[state.request_id]:
                self.scheduler.finish(state.request_id)
                self.done[state.request_id] = self.states.pop(state.request_id)
                self.scheduler.check()
        return progress

    def step(self) -> Scheduled:
        scheduled = self.schedule()
        assert scheduled is not None, "requests are there and nothing runs"
        self.compute(scheduled.step)
        return scheduled

    def drain(self) -> int:
        """Runs until all have finished. The oldest moves whenever it is its turn: there is a bound."""
        bound = sum(len(s.tokens) + self.wanted[i] for i, s in self.states.items())
        bound *= self.config.spread_every
        steps = 0
        while self.states:
            assert steps < bound, "no progress"
            self.step()
            steps += 1
        assert self.schedule() is None
        assert self.cache.free_tokens == self.cache.total_tokens
        for request_id, state in self.done.items():
            prompt = state.tokens[: state.num_prompt_tokens]
            assert state.output_tokens == continuation(prompt, self.wanted[request_id])
            if state.params.prompt_logprobs is not None:
                assert self.scored[request_id] == prompt[1:]
        return steps


def layout_of(*, block_size: int, dcp_size: int, interleave: int | None = None) -> CacheLayout:
    return CacheLayout(block_size=block_size, dcp_size=dcp_size, interleave=interleave or block_size)


def test_a_prompt_is_computed_in_chunks_and_then_token_by_token() -> None:
    bench = Bench(layout_of(block_size=4, dcp_size=2), blocks_per_pool=8, max_num_batched_tokens=8)
    bench.add(range(20), new=3)
    rows = [row for _ in range(5) for row in bench.step().step.rows]
    assert [(row.start, row.num_tokens, row.sample) for row in rows] == [
        (0, 8, False),
        (8, 8, False),
        (16, 4, True),
        (20, 1, True),
        (21, 1, True),
    ]
    assert bench.schedule() is None


def test_a_step_carries_increments_only() -> None:
    bench = Bench(layout_of(block_size=4, dcp_size=2), blocks_per_pool=8)
    bench.add(range(7), new=4)
    steps = [bench.step().step for _ in range(4)]
    assert [len(step.new) for step in steps] == [1, 0, 0, 0]
    assert [len(step.rows[0].new_tokens) for step in steps] == [0, 1, 1, 1]
    assert [step.rows[0].new_units for step in steps] == [(0, 8), (), (1,), ()]
    assert [step.step_id for step in steps] == [0, 1, 2, 3]


def test_what_ended_is_told_with_the_next_work() -> None:
    bench = Bench(layout_of(block_size=4, dcp_size=2), blocks_per_pool=8)
    first = bench.add(range(7))
    bench.step()
    assert bench.schedule() is None
    bench.add(range(5))
    assert bench.step().step.ended == (first.request_id,)
    assert list(bench.ranks.mirrors) == [1]


@pytest.mark.parametrize(
    ("interleave", "num_tokens", "num_cached"),
    [(16, 100, 96), (1, 100, 0), (1, 257, 256), (16, 32, 16), (16, 33, 32), (16, 16, 0)],
)
def test_a_prompt_sent_twice_computes_only_what_it_must(
    interleave: int, num_tokens: int, num_cached: int
) -> None:
    layout = layout_of(block_size=16, dcp_size=8, interleave=interleave)
    bench = Bench(layout, blocks_per_pool=8, max_num_batched_tokens=512)
    first = bench.add(range(num_tokens), new=2)
    bench.drain()
    second = bench.add(range(num_tokens), new=2)
    scheduled = bench.step()
    assert scheduled.step.rows[0].num_tokens == num_tokens - num_cached
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, num_cached)
    bench.drain()
    assert first.output_tokens == second.output_tokens


def test_prompt_logprobs_need_all_positions_so_nothing_is_hit() -> None:
    bench = Bench(layout_of(block_size=4, dcp_size=2), blocks_per_pool=8)
    bench.add(range(20))
    bench.drain()
    scoring = bench.add(range(20), prompt_logprobs=0)
    bench.drain()
    assert scoring.num_cached_tokens == 0
    assert bench.scored[scoring.request_id] == list(range(1, 20))


def test_a_request_larger_than_one_ranks_pool_runs() -> None:
    bench = Bench(layout_of(block_size=16, dcp_size=8), blocks_per_pool=4)
    assert bench.cache.fits(210)
    state = bench.add([i % 5 for i in range(200)], new=10)
    bench.drain()
    assert len(state.output_tokens) == 10
    assert state.num_preemptions == 0


def test_a_request_that_fills_the_pools_to_the_last_token_runs() -> None:
    bench = Bench(layout_of(block_size=4, dcp_size=2), blocks_per_pool=2)
    bench.add(range(10), new=6)
    bench.drain()


def test_a_request_that_can_never_run_is_the_engines_mistake() -> None:
    bench = Bench(layout_of(block_size=4, dcp_size=2), blocks_per_pool=2)
    with pytest.raises(AssertionError, match="can never run"):
        bench.add(range(16), new=1)


def test_rows_for_which_ranks_meet_go_together_in_every_third_step() -> None:
    bench = Bench(
        layout_of(block_size=16, dcp_size=2), blocks_per_pool=64, most_local_units=2, spread_every=3
    )
    spread = bench.add([i % 5 for i in range(50)], new=6)
    local = bench.add(range(6), new=12)
    rows = []
    for _ in range(9):
        scheduled = bench.step()
        rows.append([row.request_id for row in scheduled.step.rows])
        assert scheduled.num_spread == (spread.request_id in rows[-1])
    both, alone = [spread.request_id, local.request_id], [local.request_id]
    assert rows == [both, alone, alone] * 3
    bench.abort(local.request_id)
    for _ in range(3):  # with nobody else to run they need not wait
        assert [row.request_id for row in bench.step().step.rows] == [spread.request_id]
    assert not bench.states


def test_rows_for_which_ranks_meet_are_not_held_up_while_somebody_waits_for_room() -> None:
    layout = layout_of(block_size=16, dcp_size=2)
    bench = Bench(layout, blocks_per_pool=6, most_local_units=2, spread_every=3)
    spread, local = bench.add([i % 5 for i in range(90)], new=6), bench.add(range(6), new=12)
    waiting = bench.add([i % 7 for i in range(90)], new=2)
    for _ in range(6):
        ran = [row.request_id for row in bench.step().step.rows]
        assert ran == [spread.request_id, local.request_id]
    assert waiting.allocation is None


def test_a_short_prompt_does_not_wait_for_a_long_one() -> None:
    bench = Bench(layout_of(block_size=16, dcp_size=2), blocks_per_pool=256)
    long = bench.add([i % 11 for i in range(3000)])
    bench.step()
    another = bench.add([i % 13 for i in range(3000)])
    short = bench.add(range(30))
    bench.step()
    assert len(short.output_tokens) == 1
    assert another.num_computed_tokens == 0
    assert long.num_computed_tokens == 64 + 34


def test_short_prompts_do_not_starve_a_long_one() -> None:
    bench = Bench(layout_of(block_size=16, dcp_size=2), blocks_per_pool=256)
    long = bench.add([i % 11 for i in range(640)])
    steps = 0
    while not long.output_tokens:
        for i in range(3):
            bench.add([i, steps, *range(25)])
        bench.step()
        steps += 1
    assert steps <= 20


def test_decodes_get_their_token_while_a_prompt_is_computed() -> None:
    bench = Bench(layout_of(block_size=4, dcp_size=2), blocks_per_pool=64, max_num_batched_tokens=8)
    decode = bench.add(range(3), new=20)
    bench.step()
    bench.add([i % 7 for i in range(100)])
    for i in range(1, 12):
        rows = bench.step().step.rows
        assert [row.num_tokens for row in rows] == [1, 7]
        assert len(decode.output_tokens) == i + 1


def test_without_chunks_a_prompt_runs_whole_and_in_order() -> None:
    bench = Bench(
        layout_of(block_size=4, dcp_size=2),
        blocks_per_pool=64,
        max_num_batched_tokens=32,
        max_model_len=32,
        enable_chunked_prefill=False,
    )
    for length in (5, 28, 30, 2):
        bench.add([length] * length, new=3)
    rows = [[(r.request_id, r.num_tokens) for r in bench.step().step.rows] for _ in range(4)]
    assert rows[0] == [(0, 5)]
    assert rows[1] == [(0, 1), (1, 28)]
    assert rows[2] == [(0, 1), (1, 1), (2, 30)]
    assert rows[3] == [(1, 1), (2, 1), (3, 2)]
    bench.drain()


def test_two_long_prompts_never_preempt_one_another() -> None:
    bench = Bench(layout_of(block_size=4, dcp_size=2), blocks_per_pool=8, max_num_batched_tokens=8)
    states = [bench.add([i] * 40, new=2) for i in range(3)]  # 64 tokens in all
    bench.drain()
    assert [state.num_preemptions for state in states] == [0, 0, 0]


def test_the_youngest_gives_way_and_begins_again_at_the_head_of_the_queue() -> None:
    bench = Bench(layout_of(block_size=4, dcp_size=1), blocks_per_pool=5, max_num_seqs=2)
    old = bench.add([1] * 7, new=6)
    young = bench.add([2] * 7, new=6)
    waiting = bench.add([3] * 4, new=1)
    preempted: list[int] = []
    while not preempted:
        scheduled = bench.step()
        preempted += scheduled.preempted
    assert preempted == [young.request_id]
    assert scheduled.step.ended == (young.request_id,)
    assert [row.request_id for row in scheduled.step.rows] == [old.request_id]
    assert bench.scheduler.num_waiting == 2
    num_output = len(young.output_tokens)
    while not scheduled.admitted:
        scheduled = bench.step()
    assert scheduled.admitted[0] == young.request_id
    assert len(scheduled.step.new[0].tokens) == 4 * (7 + num_output)
    bench.drain()
    assert young.num_preemptions == 1
    assert young.num_cached_tokens == 0  # what it hits of its own is no hit of the prompt
    assert len(waiting.output_tokens) == 1


def test_to_give_way_before_the_first_token_is_no_preemption() -> None:
    layout = layout_of(block_size=4, dcp_size=1)
    bench = Bench(layout, blocks_per_pool=7, max_num_batched_tokens=4, max_num_seqs=4)
    bench.add([1] * 3, new=6)
    bench.step()
    bench.add([2] * 15)
    young = bench.add([3] * 6)
    assert bench.step().admitted == (1,)  # the young one has units, and nothing computed
    assert bench.scheduler.num_running == 3
    scheduled = bench.step()  # the old one asks for a unit
    assert bench.scheduler.num_running == 2
    assert scheduled.preempted == scheduled.step.ended == ()
    bench.drain()
    assert young.num_preemptions == 0


def test_a_scored_prompt_is_scored_once_though_it_is_computed_twice() -> None:
    bench = Bench(layout_of(block_size=4, dcp_size=1), blocks_per_pool=5)
    bench.add([1] * 7, new=6)
    young = bench.add([2, 3, 4, 5, 6, 7, 8], new=6, prompt_logprobs=0)
    bench.drain()
    assert young.num_preemptions == 1
    assert bench.scored[young.request_id] == [3, 4, 5, 6, 7, 8]


def test_equal_prompts_that_come_together_are_computed_once() -> None:
    bench = Bench(layout_of(block_size=4, dcp_size=2), blocks_per_pool=64, max_num_batched_tokens=16)
    states = [bench.add([i % 7 for i in range(64)], new=2) for _ in range(3)]
    bench.drain()
    assert [state.num_cached_tokens for state in states] == [0, 60, 60]
    assert bench.ranks.num_computed == 64 + 4 + 4 + 3


def test_an_abort_frees_units_at_once_wherever_the_request_is() -> None:
    bench = Bench(layout_of(block_size=4, dcp_size=2), blocks_per_pool=4, max_num_batched_tokens=8)
    running = bench.add(range(20), new=3)
    waiting = bench.add(range(20), new=3)
    scheduled = bench.schedule()
    assert scheduled is not None
    bench.abort(waiting.request_id)
    assert bench.scheduler.num_waiting == 0
    bench.abort(running.request_id)
    assert bench.cache.free_tokens == bench.cache.total_tokens
    assert bench.compute(scheduled.step) == []
    assert not bench.scheduler.abort(running.request_id)
    assert bench.schedule() is None


def test_a_step_under_way_must_come_back_first() -> None:
    bench = Bench(layout_of(block_size=4, dcp_size=2), blocks_per_pool=4)
    bench.add(range(5))
    scheduled = bench.schedule()
    assert scheduled is not None
    with pytest.raises(AssertionError, match="not come back"):
        bench.scheduler.schedule()
    with pytest.raises(AssertionError, match="another step"):
        bench.scheduler.update(StepResult(scheduled.step.step_id + 1, ()))


@pytest.mark.parametrize(
    ("limits", "sentence"),
    [
        ({"max_num_seqs": 0}, "--max-num-seqs 0, .* at least 1"),
        ({"max_num_seqs": 65}, "tokens 64 is less than --max-num-seqs 65"),
        ({"enable_chunked_prefill": False}, "tokens 64 is less than --max-model-len 4096"),
        ({"mixed_chunk_size": 0}, "--mixed-chunk-size 0 must be at least 1"),
    ],
)
def test_limits_that_cannot_work_are_refused(limits: dict, sentence: str) -> None:
    sizes = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 4096} | limits
    with pytest.raises(ConfigError, match=sentence):
        SchedulerConfig(**sizes)


@pytest.mark.parametrize(
    ("num_left", "chunked", "shares"),
    [
        ([1, 1, 1], True, [1, 1, 1]),
        ([100], True, [10]),
        ([1, 100, 100], True, [1, 9, 0]),
        ([100, 4], True, [6, 4]),
        ([100, 7, 3, 2], True, [5, 0, 3, 2]),
        ([2, 100, 5], True, [2, 3, 5]),
        ([2, 100, 9], True, [2, 8, 0]),
        ([100, 1, 100, 3], True, [6, 1, 0, 3]),
        ([100, 3], False, [0, 0]),
        ([4, 6, 2], False, [4, 6, 0]),
        ([4, 7, 2, 1], False, [4, 0, 0, 1]),
        ([], True, []),
    ],
)
def test_shares_of_a_budget_of_ten(num_left: list[int], chunked: bool, shares: list[int]) -> None:
    assert share_budget(num_left, budget=10, chunked=chunked) == shares


@pytest.mark.parametrize(
    ("num_left", "chunked", "shares"),
    [
        ([100], True, [10]),  # nobody waits for it
        ([1, 100], True, [1, 4]),
        ([1, 100, 100], True, [1, 4, 0]),
        ([1, 1, 1, 1, 1, 1, 1, 100], True, [1, 1, 1, 1, 1, 1, 1, 3]),
        ([100, 1, 2], True, [2, 1, 2]),
        ([1, 6], False, [1, 6]),  # a prompt that may not be cut runs whole
        ([1, 1], True, [1, 1]),
    ],
)
def test_who_decodes_waits_for_four_tokens_of_prompts_at_the_most(
    num_left: list[int], chunked: bool, shares: list[int]
) -> None:
    assert share_budget(num_left, budget=10, chunked=chunked, mixed=4) == shares


@given(
    num_left=st.lists(st.integers(1, 30) | st.just(1), max_size=8),
    budget=st.integers(8, 40),
    chunked=st.booleans(),
    mixed=st.none() | st.integers(1, 40),
)
def test_shares_stay_within_the_budget_and_waste_nothing(
    num_left: list[int], budget: int, chunked: bool, mixed: int | None
) -> None:
    shares = share_budget(num_left, budget=budget, chunked=chunked, mixed=mixed)
    assert all(0 <= share <= left for share, left in zip(shares, num_left, strict=True))
    assert all(share == 1 for share, left in zip(shares, num_left, strict=True) if left == 1)
    assert sum(shares) <= budget
    others = [(share, left) for share, left in zip(shares, num_left, strict=True) if left > 1]
    ones = num_left.count(1)
    spare = budget - ones if mixed is None or not ones else min(budget - ones, mixed)
    if chunked:
        assert sum(shares) == min(ones + spare, sum(num_left))
        assert not others or 2 * others[0][0] >= min(spare, 2 * others[0][1])
    else:
        assert all(share in (0, left) for share, left in others)


@pytest.mark.parametrize("dcp_size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize(("block_size", "interleave"), [(2, 2), (4, 4), (4, 2), (2, 1)])
def test_crowded_pools_give_every_request_the_text_it_has_alone(
    dcp_size: int, block_size: int, interleave: int
) -> None:
    layout = layout_of(block_size=block_size, dcp_size=dcp_size, interleave=interleave)
    bench = Bench(
        layout,
        blocks_per_pool=-(-96 // (block_size * dcp_size)),
        max_num_seqs=6,
        max_num_batched_tokens=24,
    )
    draw = random.Random(dcp_size)
    for _ in range(40):
        prefix = [draw.randrange(3)] * draw.randrange(1, 50)
        bench.add([*prefix, draw.randrange(VOCABULARY)], new=draw.randrange(1, 40))
        if draw.random() < 0.2:
            bench.abort(draw.choice(list(bench.states)))
        for _ in range(draw.randrange(12)):
            if bench.states:
                bench.step()
    bench.drain()
    assert sum(state.num_preemptions for state in bench.done.values()) > 0
    assert sum(state.num_cached_tokens or 0 for state in bench.done.values()) > 0


class SchedulerMachine(RuleBasedStateMachine):
    """Random arrivals, lengths, aborts and pools so small that preemption is the rule."""

    @initialize(
        sizes=st.sampled_from([(1, 1), (2, 2), (4, 2), (4, 4)]),
        dcp_size=st.sampled_from([1, 2, 3, 4, 8]),
        num_tokens=st.sampled_from([48, 64, 96]),
        budget=st.sampled_from([4, 9, 48]),
        max_num_seqs=st.sampled_from([1, 3, 4]),
        caching=st.booleans(),
        chunked=st.booleans(),
        most_local_units=st.sampled_from([0, 3, 8]),
        spread_every=st.sampled_from([1, 3]),
        mixed_chunk_size=st.sampled_from([None, 1, 5]),
    )
    def begin(
        self,
        sizes: tuple[int, int],
        dcp_size: int,
        num_tokens: int,
        budget: int,
        max_num_seqs: int,
        caching: bool,
        chunked: bool,
        most_local_units: int,
        spread_every: int,
        mixed_chunk_size: int | None,
    ) -> None:
        block_size, interleave = sizes
        self.bench = Bench(
            layout_of(block_size=block_size, dcp_size=dcp_size, interleave=interleave),
            blocks_per_pool=-(-num_tokens // (dcp_size * block_size)),
            enable_prefix_caching=caching,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget if chunked else 48,
            max_model_len=48,
            enable_chunked_prefill=chunked,
            most_local_units=most_local_units,
            spread_every=spread_every,
            mixed_chunk_size=mixed_chunk_size,
        )
        self.under_way: Step | None = None

    @rule(
        kind=st.integers(0, 2),
        length=st.integers(1, 30),
        new=st.integers(1, 18),
        scored=st.sampled_from([None, None, 0]),
    )
    def add(self, kind: int, length: int, new: int, scored: int | None) -> None:
        self.bench.add([kind + i // 9 for i in range(length)], new=new, prompt_logprobs=scored)

    @precondition(lambda self: self.bench.states)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.bench.abort(data.draw(st.sampled_from(sorted(self.bench.states))))

    @precondition(lambda self: self.under_way is None)
    @rule()
    def schedule(self) -> None:
        scheduled = self.bench.schedule()
        assert (scheduled is None) == (not self.bench.states)
        self.under_way = None if scheduled is None else scheduled.step

    @precondition(lambda self: self.under_way is not None)
    @rule()
    def compute(self) -> None:
        assert self.under_way is not None
        self.bench.compute(self.under_way)
        self.under_way = None

    @precondition(lambda self: self.under_way is None)
    @rule(count=st.integers(1, 8))
    def steps(self, count: int) -> None:
        for _ in range(count):
            if self.bench.states:
                self.bench.step()

    @invariant()
    def all_is_counted(self) -> None:
        if hasattr(self, "bench"):
            self.bench.scheduler.check()

    def teardown(self) -> None:
        if hasattr(self, "bench"):
            if self.under_way is not None:
                self.bench.compute(self.under_way)
            self.bench.drain()


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=120, stateful_step_count=30, deadline=None)
