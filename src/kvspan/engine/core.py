"""The loop: requests in, steps out, tokens back. Decides everything that is not text. Loads no torch.

One `step()` schedules, lets the executor run it, and says what each request got and whether that ended
it. Time, ranks and weights are the executor's affair, so a simulator can put another one in its place.
"""

from collections.abc import Callable, Sequence
from hashlib import blake2b

import numpy as np

from kvspan.cache.manager import CacheManager
from kvspan.cache.placement import Elastic, Placement, round_robin
from kvspan.cache.prefix import KeySpace, UnitKeys
from kvspan.cache.table import RankTable
from kvspan.config.resolved import Resolved
from kvspan.cost.memory import CachePlan, plan_cache
from kvspan.engine.checks import check_length, check_request
from kvspan.engine.counter import StepCounter
from kvspan.engine.events import EngineLoad, EngineStats, Event
from kvspan.engine.forms import Forms
from kvspan.engine.messages import Add
from kvspan.engine.snapshot import Snapshot, look
from kvspan.errors import EngineDeadError
from kvspan.request import FinishReason, SamplingParams
from kvspan.sampling.grammar import Grammars
from kvspan.scheduler import Progress, Scheduler, SchedulerConfig
from kvspan.sequence import SequenceState
from kvspan.step import CountedTokens, Executor, Fill, pack_tokens, unpack_tokens


class EngineCore:
    """Requests, scheduler and blocks of one replica.

    Args:
        resolved: what will run.
        executor: the ranks; they are started, and their cache is sized and allocated.
        grammars: for outputs that are held to a form; None = there is no tokenizer to make any.

    Raises:
        ModelError: the checkpoint cannot be loaded.
        ConfigError: the cache that was asked for does not fit, or is too small for one request.
    """

    def __init__(self, resolved: Resolved, executor: Executor, grammars: Grammars | None = None) -> None:
        self.resolved = resolved
        self._forms = Forms(grammars or Grammars(None, vocab_size=0, eos_token_ids=()))
        self._executor = executor
        try:
            self.reports = tuple(executor.start())
            self.plan: CachePlan = plan_cache(self.reports, resolved)
            executor.allocate_cache(self.plan.blocks_per_rank)
        except BaseException:
            executor.shutdown()
            raise
        self._keys = KeySpace(
            layout=resolved.cache_layout, kv_dtype=resolved.kv_dtype, model=resolved.model
        )
        self._counter = StepCounter(resolved)
        self._begin_empty()
        self._states: dict[int, SequenceState] = {}
        self._next_id = 0
        self._dead: str | None = None

    @property
    def has_work(self) -> bool:
        """Whether any request is there, and ranks to work on it."""
        return bool(self._states) and self._dead is None

    @property
    def stats(self) -> EngineStats:
        """What its steps have done."""
        return self._counter.stats

    @property
    def load(self) -> EngineLoad:
        """What it is busy with."""
        return EngineLoad(
            num_running=self._scheduler.num_running,
            num_waiting=self._scheduler.num_waiting,
            used_blocks=self._cache.used_by_pool,
        )

    def look(self) -> Snapshot:
        """Its blocks and requests at this moment."""
        return look(self._cache, self._states.values())

    @property
    def num_waiting(self) -> int:
        """Requests that wait for room."""
        return self._scheduler.num_waiting

    @property
    def total_tokens(self) -> int:
        """Tokens that the pools of the whole DCP group hold."""
        return self._cache.total_tokens

    @property
    def free_tokens(self) -> int:
        """Tokens for which the pools of the whole DCP group have room."""
        return self._cache.free_tokens

    def check_request(self, prompt: Sequence[int], params: SamplingParams) -> None:
        """Refuses a request that can never run; see the function of the same name."""
        check_request(self.resolved, prompt, params)
        self._forms.check(params)

    def add(self, prompt: Sequence[int], params: SamplingParams, *, seed: int) -> int:
        """Queues a request for one output.

        Args:
            prompt: token ids.
            params: how tokens are chosen; `n` is the caller's affair.
            seed: of its random stream.

        Returns:
            The engine's number for it.

        Raises:
            RequestError: it can never run.
        """
        return self.take(Add(self._next_id, pack_tokens(prompt), len(prompt), params, seed))

    def take(self, order: Add) -> int:
        """Queues what a server orders: a request for one output, which another engine may have begun.

        Args:
            order: with a number that no other request of this engine has had.

        Returns:
            That number.

        Raises:
            RequestError: it can never run.
        """
        tokens = unpack_tokens(order.tokens).tolist()
        prompt, output = tokens[: order.num_prompt_tokens], tokens[order.num_prompt_tokens :]
        self.check_request(prompt, order.params)
        params = self._forms.begin(order.request_id, order.params)
        for token_id in output:
            self._forms.accept(order.request_id, token_id)
        state = SequenceState(
            request_id=order.request_id,
            tokens=tokens,
            num_prompt_tokens=len(prompt),
            params=params,
            seed=order.seed,
            keys=self._keys.keys(tokens, cache_salt=order.cache_salt),
            priority=order.priority,
        )
        state.num_scored_tokens = order.num_scored_tokens
        return self._queue(state)

    def add_counted(self, num_tokens: int, params: SamplingParams, *, keys: UnitKeys) -> int:
        """Queues a request of which only lengths and keys are known, for ranks that compute nothing.

        Args:
            num_tokens: of its prompt.
            params: how many tokens it gets.
            keys: of its units; where two requests have the same key, their prefixes count as equal.

        Returns:
            The engine's number for it.

        Raises:
            RequestError: it can never run.
        """
        check_length(self.resolved, num_tokens)
        return self._queue(
            SequenceState(
                request_id=self._next_id,
                tokens=CountedTokens(num_tokens),
                num_prompt_tokens=num_tokens,
                params=params,
                seed=0,
                keys=keys,
            )
        )

    def pretend(self, prompts: Sequence[Sequence[int]], *, seed: int) -> list[Fill] | None:
        """Counts prompts as computed, so that a request with one of them hits it as a prefix.

        For measurements: the keys and values of their full units have to be made up, and are to stay in
        the cache until the requests come, so the pools must not be full. Until all are placed none is
        freed, so that they lie as those of requests that run side by side.

        Args:
            prompts: token ids of prompts that have not been seen.
            seed: of what ranks make up, one higher for each.

        Returns:
            What they have to fill; None, and nothing has changed, when the pools have no room for them.
        """
        placed: list[tuple[int, Fill]] = []
        for number, prompt in enumerate(prompts):
            request_id, self._next_id = self._next_id, self._next_id + 1
            keys = self._keys.keys(prompt)
            held = self._cache.allocate(request_id, keys, num_tokens=len(prompt), max_hit_tokens=0)
            if held is None:
                break
            placed.append((request_id, Fill(tuple(held.units), len(prompt), seed + number)))
        fits = len(placed) == len(prompts)
        for request_id, fill in placed:
            if fits:
                self._cache.register(request_id, num_computed_tokens=fill.num_tokens)
            self._cache.free(request_id)
        return [fill for _, fill in placed] if fits else None

    def end(self, request_id: int) -> None:
        """Ends a request from outside, at any moment; its blocks are free at once."""
        self._scheduler.abort(request_id)
        self._states.pop(request_id, None)
        self._forms.end(request_id)

    def step(self, begins: Callable[[tuple[int, ...]], None] = lambda _: None) -> list[Event]:
        """Runs one step.

        Args:
            begins: called before it runs with the requests whose first tokens it computes, if there are
                any.

        Returns:
            What each of its rows gave; nothing if there was nothing to do.

        Raises:
            EngineDeadError: a rank died or hung. No request gets anything more, unless `revive` is
                called.
        """
        if self._dead is not None:
            raise EngineDeadError(self._dead)
        try:
            return self._step(begins)
        except BaseException as failure:
            # Whatever breaks a step off leaves ranks, scheduler and blocks in unequal states.
            died = isinstance(failure, EngineDeadError)
            self._dead = str(failure) if died else f"A step was broken off by {type(failure).__name__}."
            self._executor.shutdown()
            raise

    def revive(self, executor: Executor) -> None:
        """Goes on with other ranks, mostly after a step has failed; no request is lost.

        Their tokens are here, so each is computed again and continues with the token that it would
        have got. The cache begins empty.

        Args:
            executor: ranks of the same kind, not started yet.

        Raises:
            EngineDeadError: one of these died or hung as well; this may be called again.
        """
        self._executor.shutdown()
        self._executor = executor
        try:
            executor.start()
            executor.allocate_cache(self.plan.blocks_per_rank)
        except BaseException:
            executor.shutdown()
            raise
        self._begin_empty()
        for state in self._states.values():
            state.begin_again()
            self._scheduler.add(state)
        self._dead = None

    def _begin_empty(self) -> None:
        """A scheduler and a cache for ranks that know of nothing yet."""
        resolved = self.resolved
        self._cache = CacheManager(
            resolved.cache_layout,
            blocks_per_pool=self.plan.blocks_per_rank,
            enable_prefix_caching=resolved.enable_prefix_caching,
            placement=_placement(resolved),
            num_homes=resolved.num_homes,
            most_local_units=resolved.cache_layout.num_units(resolved.span_threshold),
        )
        self._counter.begin_empty()
        self._scheduler = Scheduler(
            SchedulerConfig(
                max_num_seqs=resolved.max_num_seqs,
                max_num_batched_tokens=resolved.max_num_batched_tokens,
                mixed_chunk_size=resolved.mixed_chunk_size,
                max_model_len=resolved.max_model_len,
                enable_chunked_prefill=resolved.enable_chunked_prefill,
                spread_every=resolved.spread_every,
            ),
            self._cache,
        )

    def _step(self, begins: Callable[[tuple[int, ...]], None]) -> list[Event]:
        scheduled = self._scheduler.schedule()
        if scheduled is None:
            return []
        if scheduled.admitted:
            begins(scheduled.admitted)
        self._executor.submit(self._forms.masked(scheduled.step))
        travelled = self._counter.travel(scheduled, self._states)  # while the ranks work
        progress = self._scheduler.update(self._executor.collect())
        num_spills = self._cache.num_spills
        self._counter.count(scheduled, travelled, progress, self._states, num_spills=num_spills)
        return [self._event(p) for p in progress]

    def kv_tokens_by_rank(self) -> list[int]:
        """Tokens of requests that each DCP rank keeps, by `dcp_rank`; their sum is what was computed."""
        layout, blocks = self.resolved.cache_layout, self.plan.blocks_per_rank
        totals = [0] * layout.dcp_size
        for state in self._states.values():
            units = state.allocation.units if state.allocation is not None else []
            for rank in range(layout.dcp_size):
                table = RankTable(layout, dcp_rank=rank, blocks_per_pool=blocks)
                table.append(units)
                totals[rank] += int(table.local_bounds(np.array([state.num_computed_tokens]))[0])
        return totals

    def check(self) -> None:
        """Recounts every invariant of scheduler and cache; for tests."""
        self._scheduler.check()

    def shutdown(self) -> None:
        """Ends all ranks; a second call does nothing."""
        self._executor.shutdown()

    def _queue(self, state: SequenceState) -> int:
        self._next_id = max(self._next_id, state.request_id + 1)
        self._scheduler.add(state)
        self._states[state.request_id] = state
        return state.request_id

    def _event(self, progress: Progress) -> Event:
        state, sampled = progress.state, progress.sampled
        token_id = sampled.token_id
        held = self._forms.accept(state.request_id, token_id)
        failure = sampled.failure or held.failure
        reason, stop_token = self._finish(state, token_id)
        if failure:
            reason = FinishReason.ERROR
        elif held.ended:
            reason = FinishReason.STOP
        if reason is not None:
            self._scheduler.finish(state.request_id)
            del self._states[state.request_id]
            self._forms.end(state.request_id)
        return Event(
            request_id=state.request_id,
            token_id=sampled.token_id,
            logprobs=sampled.logprobs,
            prompt_logprobs=sampled.prompt_logprobs,
            finish_reason=reason,
            stop_token=stop_token,
            num_cached_tokens=state.num_cached_tokens or 0,
            num_computed_tokens=state.num_computed_tokens,
            form_ended=held.ended and not self._ends_text(token_id),
            failure=failure,
        )

    def _finish(
        self, state: SequenceState, token_id: int | None
    ) -> tuple[FinishReason | None, int | None]:
        """Whether a sampled token ends its request, and which stop token did it."""
        if token_id is None:
            return None, None
        params, num_output = state.params, len(state.tokens) - state.num_prompt_tokens
        if num_output >= params.min_tokens:
            if token_id in params.stop_token_ids:
                return FinishReason.STOP, token_id
            if self._ends_text(token_id) and not params.ignore_eos:
                return FinishReason.STOP, None
        room = self.resolved.max_model_len - state.num_prompt_tokens
        limit = room if params.max_tokens is None else min(room, params.max_tokens)
        return (FinishReason.LENGTH if num_output >= limit else None), None

    def _ends_text(self, token_id: int | None) -> bool:
        return token_id in self.resolved.model_config.eos_token_ids


def _placement(resolved: Resolved) -> Placement:
    """Round the ranks, or at home up to the threshold."""
    if not resolved.span_threshold:
        return round_robin
    most_units = resolved.cache_layout.num_units(resolved.span_threshold)
    return Elastic(num_homes=resolved.num_homes, most_units=most_units)


def stream_seed(*parts: int) -> int:
    """The seed of one request's random stream, from whatever tells it apart; 0..2^63-1.

    Args:
        parts: e.g. (the request's own seed, index of the output).
    """
    digest = blake2b(",".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
