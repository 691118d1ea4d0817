"""Who runs in a step, with how many tokens. One budget of tokens a step; prefill and decode are one.

A request has some tokens (prompt and output so far), of which the first `num_computed_tokens` have their
keys and values in the cache. A step brings requests nearer to having all of them computed; one that gets
there samples its next token. A decode is the case where one token is left, a prefix hit or a chunk of a
prompt the case where some are computed already.

    waiting --room for the whole prompt--> running --finish, abort--> gone
       ^                                      |
       +---- no room for a token: the last in line gives all back

A request's place in line is its priority, the lower value first, and then its arrival. Both queues are
in that order. Nobody overtakes who waits before them, and of those that run the first in line is never
preempted for another one, so it always goes on.

Knows requests, tokens as numbers, and the cache manager. Knows no tensors, no clock and no text.
"""

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass

from kvspan.cache.manager import Allocation, CacheManager
from kvspan.errors import ConfigError
from kvspan.sequence import SequenceState
from kvspan.step import Row, Sampled, Step, StepResult


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits of a step.

    Args:
        max_num_seqs: requests that run at a time.
        max_num_batched_tokens: tokens that a step computes.
        max_model_len: tokens of a request, output included.
        mixed_chunk_size: tokens of prompts in a step in which others decode, and wait for all of it;
            None = what the step has room for, as where prompts are not cut.
        enable_chunked_prefill: whether a prompt may be computed in several steps.
        spread_every: rows for which ranks have to meet run in every so many steps, while others are
            there to run in between and nobody waits for room; 1 = in each.

    Raises:
        ConfigError: a step could not hold a token of each request, or a whole prompt where it must.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    mixed_chunk_size: int | None = None
    enable_chunked_prefill: bool = True
    spread_every: int = 1

    def __post_init__(self) -> None:
        budget = f"--max-num-batched-tokens {self.max_num_batched_tokens}"
        num_seqs = f"--max-num-seqs {self.max_num_seqs}"
        length = f"--max-model-len {self.max_model_len}"
        if min(self.max_num_seqs, self.max_num_batched_tokens, self.max_model_len) < 1:
            raise ConfigError(f"{num_seqs}, {budget} and {length} must all be at least 1.")
        if self.mixed_chunk_size is not None and self.mixed_chunk_size < 1:
            raise ConfigError(
                f"--mixed-chunk-size {self.mixed_chunk_size} must be at least 1: prompts would wait "
                "until nobody decodes."
            )
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"{budget} is less than {num_seqs}: a step could not give each running request its "
                "token. Raise the first or lower the second."
            )
        if not self.enable_chunked_prefill and self.max_num_batched_tokens < self.max_model_len:
            raise ConfigError(
                f"{budget} is less than {length}: without chunked prefill, a long prompt would never "
                "fit a step. Raise the first, lower the second, or leave out "
                "--no-enable-chunked-prefill."
            )


@dataclass(frozen=True, slots=True)
class Scheduled:
    """A step, and what was decided on the way to it.

    Args:
        step: for the workers; it has at least one row.
        admitted: requests whose first tokens it computes; also when they begin again.
        preempted: requests that had begun and gave their units back.
        num_spread: rows of requests for which ranks have to meet in attention.
    """

    step: Step
    admitted: tuple[int, ...]
    preempted: tuple[int, ...]
    num_spread: int


@dataclass(frozen=True, slots=True)
class Progress:
    """What a step gave a request.

    Args:
        state: the request; a sampled token is already among its tokens.
        sampled: what the row gave, less the prompt positions that it has had before (it was preempted).
    """

    state: SequenceState
    sampled: Sampled


class Scheduler:
    """Decides step by step. `schedule` and `update` alternate; `add`, `finish`, `abort` at any time.

    Args:
        config: limits of a step.
        cache: the units that requests share.
    """

    def __init__(self, config: SchedulerConfig, cache: CacheManager) -> None:
        self._config = config
        self._cache = cache
        self._states: dict[int, SequenceState] = {}
        self._waiting: list[SequenceState] = []  # both in order of their places
        self._running: list[SequenceState] = []
        self._ended: list[int] = []  # known to the workers, to be forgotten
        self._under_way: Step | None = None
        self._next_step_id = 0

    @property
    def num_running(self) -> int:
        """Requests that hold units."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for room."""
        return len(self._waiting)

    def add(self, state: SequenceState) -> None:
        """Queues a request, which must fit the pools (`CacheManager.fits`) with all its output."""
        assert state.request_id not in self._states, f"request {state.request_id} is there already"
        assert len(state.tokens), f"request {state.request_id} has no tokens"
        assert self._cache.fits(len(state.tokens) + 1), f"request {state.request_id} can never run"
        self._states[state.request_id] = state
        insort(self._waiting, state, key=_place)

    def finish(self, request_id: int) -> None:
        """Ends a request that has all it wants. Its units are free at once, its prefix may be hit."""
        self._remove(self._states[request_id])

    def abort(self, request_id: int) -> bool:
        """Ends a request whatever it is doing; a row under way is computed and dropped.

        Returns:
            Whether it was there. It may have finished before somebody lost interest.
        """
        state = self._states.get(request_id)
        if state is None:
            return False
        self._remove(state)
        return True

    def schedule(self) -> Scheduled | None:
        """The next step, or None when there is nothing to compute."""
        assert self._under_way is None, "the last step has not come back"
        preempted = self._make_room()
        self._look_again()
        self._admit()
        step = self._step()
        if not step.rows:
            return None
        self._ended.clear()
        self._next_step_id += 1
        self._under_way = step
        admitted = tuple(new.request_id for new in step.new)
        num_spread = sum(self._is_spread(row.request_id) for row in step.rows)
        return Scheduled(step, admitted, tuple(preempted), num_spread)

    def update(self, result: StepResult) -> list[Progress]:
        """Takes in what the step under way gave.

        Returns:
            One entry for each row whose request is still there, in the order of the rows.
        """
        step, self._under_way = self._under_way, None
        assert step is not None, "no step is under way"
        assert step.step_id == result.step_id, "the result is of another step"
        return [
            self._advance(self._states[row.request_id], row, sampled)
            for row, sampled in zip(step.rows, result.rows, strict=True)
            if row.request_id in self._states
        ]

    def check(self) -> None:
        """Recounts everything that must hold, here and in the cache.

        Raises:
            AssertionError: says what does not add up.
        """
        self._cache.check()
        for queue in (self._running, self._waiting):
            assert queue == sorted(queue, key=_place), "out of order"
        known = {state.request_id for state in (*self._running, *self._waiting)}
        assert known == set(self._states), "a request is lost"
        assert len(self._running) + len(self._waiting) == len(known), "a request is in line twice"
        assert self.num_running <= self._config.max_num_seqs, "too many run"
        running = {state.request_id for state in self._running}
        assert running == self._cache.holders, "to run is not to hold units"
        for state in self._waiting:
            assert state.allocation is None, f"request {state.request_id} waits with units"
            counts = (state.num_computed_tokens, state.num_sent_tokens, state.num_sent_units)
            assert counts == (0, 0, 0), f"request {state.request_id} waits with {counts}"
        for state in self._running:
            assert state.allocation is not None, f"request {state.request_id} runs without units"
            num_units = len(state.allocation.units)
            computed_units = self._cache.layout.num_units(state.num_computed_tokens)
            assert 0 <= state.num_computed_tokens < len(state.tokens), "more computed than known"
            assert computed_units <= num_units, f"request {state.request_id} computes without room"
            assert state.num_sent_tokens <= len(state.tokens), "sent a token that is not there"
            assert state.num_sent_units <= num_units, "sent a unit that is not there"

    def _make_room(self) -> list[int]:
        """Gives each running request, in line, room for the tokens that it has.

        When there is none, the last in line gives its units back, if need be the one that asks.
        """
        preempted = []
        served = 0
        while served < len(self._running):
            state = self._running[served]
            if self._cache.grow(state.request_id, num_tokens=len(state.tokens)):
                served += 1
                continue
            assert len(self._running) > 1, f"request {state.request_id} does not fit alone"
            last = self._running.pop()
            self._free(last)
            if last.begin_again():
                preempted.append(last.request_id)
            insort(self._waiting, last, key=_place)  # and will compute prompt and output again
        return preempted

    def _look_again(self) -> None:
        """Lets requests that hold units, but were given no tokens yet, hit what others computed."""
        for state in self._running:
            if not state.num_sent_tokens:
                limit = self._max_hit_tokens(state)
                again = self._cache.look_again(state.request_id, max_hit_tokens=limit)
                self._begin(state, again)

    def _admit(self) -> None:
        """Lets requests run, in line, while there is room.

        A request gets room for its whole prompt and one token more, although its first chunk needs less:
        if prompts took units chunk by chunk, two long ones could fill the pools half done each, and
        preempt one another for ever. So only a decode ever asks for a unit, and the first in line
        gets it.
        """
        while self._waiting and self.num_running < self._config.max_num_seqs:
            state = self._waiting[0]
            allocation = self._cache.allocate(
                state.request_id,
                state.keys,
                num_tokens=len(state.tokens) + 1,
                max_hit_tokens=self._max_hit_tokens(state),
            )
            if allocation is None:
                break  # nobody overtakes: a large request would wait for ever
            self._begin(state, allocation)
            insort(self._running, self._waiting.pop(0), key=_place)

    def _begin(self, state: SequenceState, allocation: Allocation) -> None:
        """Gives a request of which nothing is computed its units, the hits among them computed."""
        state.allocation = allocation
        state.num_computed_tokens = allocation.num_hit_tokens
        if not state.num_preemptions:  # later hits are on what it computed itself
            state.num_cached_tokens = allocation.num_hit_tokens

    def _max_hit_tokens(self, state: SequenceState) -> int:
        """The last token is computed even if all are known, and all are if each must be scored."""
        return len(state.tokens) - 1 if state.params.prompt_logprobs is None else 0

    def _step(self) -> Step:
        """Shares the budget out and writes down who does what."""
        states = self._in_turn()
        shares = share_budget(
            [state.num_left for state in states],
            budget=self._config.max_num_batched_tokens,
            mixed=self._config.mixed_chunk_size,
            chunked=self._config.enable_chunked_prefill,
        )
        work = [(state, n) for state, n in zip(states, shares, strict=True) if n]
        new = tuple(state.introduction() for state, _ in work if not state.num_sent_tokens)
        rows = tuple(state.row(num_tokens) for state, num_tokens in work)
        return Step(self._next_step_id, new, rows, tuple(self._ended))

    def _in_turn(self) -> list[SequenceState]:
        """Who runs in this step: everybody, or those for whom ranks need not meet.

        Spread requests hold most of the room, so while somebody waits for it none of them is held up.
        """
        if self._waiting or self._next_step_id % self._config.spread_every == 0:
            return self._running
        local = [state for state in self._running if not self._is_spread(state.request_id)]
        return local or self._running

    def _is_spread(self, request_id: int) -> bool:
        allocation = self._states[request_id].allocation
        return allocation is not None and self._cache.spans(allocation)

    def _advance(self, state: SequenceState, row: Row, sampled: Sampled) -> Progress:
        """Takes in one row's result."""
        assert sampled.request_id == row.request_id, "results are not in the order of the rows"
        can_sample = row.sample and not sampled.failure
        assert (sampled.token_id is not None) == can_sample, "sampled where it should not, or not"
        state.num_computed_tokens += row.num_tokens
        if sampled.token_id is not None:
            state.tokens.append(sampled.token_id)
        if not sampled.failure:  # else its keys may be no numbers
            self._cache.register(state.request_id, num_computed_tokens=state.num_computed_tokens)
        known = max(state.num_scored_tokens - row.start, 0)
        state.num_scored_tokens = max(state.num_scored_tokens, row.start + len(sampled.prompt_logprobs))
        fresh = sampled.prompt_logprobs[known:]
        told = Sampled(row.request_id, sampled.token_id, sampled.logprobs, fresh, sampled.failure)
        return Progress(state, told)

    def _remove(self, state: SequenceState) -> None:
        """Forgets a request, here and at the workers."""
        del self._states[state.request_id]
        if state.allocation is None:
            self._waiting.remove(state)
            return
        self._running.remove(state)
        self._free(state)

    def _free(self, state: SequenceState) -> None:
        """Frees a running request's units, and lets the workers forget it."""
        self._cache.free(state.request_id)
        if state.num_sent_tokens:
            self._ended.append(state.request_id)


def _place(state: SequenceState) -> tuple[int, int]:
    return state.place


def share_budget(
    num_left: Sequence[int], *, budget: int, chunked: bool, mixed: int | None = None
) -> list[int]:
    """Shares a step's tokens among running requests.

    Whoever has one token left gets it. Of the rest the first of the others gets at least half; the
    other half goes first to those that it brings to their end, so that a short prompt need not wait
    for a long one, and then to the first again, so that nothing is left over. If prompts are not cut,
    they go whole and in order: were a shorter one let past, one that fits only an empty step would
    starve.

    Args:
        num_left: tokens that each has still to compute, at least 1, in line.
        budget: tokens of the step, at least one a request.
        chunked: whether a request may get less than it has left, when that is more than one token.
        mixed: tokens at the most for those who may get less, if anybody has one token left; None = all
            that the budget has.

    Returns:
        Tokens of each.
    """
    shares = [int(left == 1) for left in num_left]
    spare = budget - sum(shares)
    others = [i for i, left in enumerate(num_left) if left > 1]

    def give(i: int, num_tokens: int) -> None:
        nonlocal spare
        shares[i] += num_tokens
        spare -= num_tokens

    if not chunked:
        for i in others:
            if num_left[i] > spare:
                break
            give(i, num_left[i])
        return shares
    if mixed is not None and len(others) < len(num_left):
        spare = min(spare, mixed)
    for i in others[:1]:
        give(i, min(num_left[i], -(-spare // 2)))
    for i in others[1:]:
        if num_left[i] <= spare:
            give(i, num_left[i])
    for i in others:
        give(i, min(num_left[i] - shares[i], spare))
    return shares
