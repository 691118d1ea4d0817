"""The loop: requests in, steps out, tokens back. Decides everything that is not text. Loads no torch.

One `step()` schedules, lets the executor run it, and says what each request got and whether that ended
it. Time, ranks and weights are the executor's affair, so a simulator can put another one in its place.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from kvspan.cache.manager import CacheManager
from kvspan.cache.prefix import KeySpace
from kvspan.cache.table import RankTable
from kvspan.config.resolved import Resolved
from kvspan.cost.memory import CachePlan, plan_cache
from kvspan.errors import EngineDeadError, RequestError
from kvspan.request import FinishReason, SamplingParams
from kvspan.scheduler import Progress, Scheduled, Scheduler, SchedulerConfig, SequenceState
from kvspan.step import Executor, Fill, TokenLogprob


@dataclass(frozen=True, slots=True)
class Event:
    """What a step gave a request.

    Args:
        request_id: whose it is.
        token_id: the sampled token; None while its prompt is being computed.
        logprobs: of the sampled token and the most probable ones, if asked for.
        prompt_logprobs: of further prompt tokens, if asked for.
        finish_reason: why it ended with this; None = it goes on.
        stop_token: the one of `stop_token_ids` that ended it, if one did.
        num_cached_tokens: tokens of its prompt that were found in the cache.
        num_computed_tokens: tokens whose keys and values are in the cache by now.
    """

    request_id: int
    token_id: int | None
    logprobs: tuple[TokenLogprob, ...]
    prompt_logprobs: tuple[tuple[TokenLogprob, ...], ...]
    finish_reason: FinishReason | None
    stop_token: int | None
    num_cached_tokens: int
    num_computed_tokens: int


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters since the engine started.

    Args:
        steps: steps run.
        prompt_tokens: tokens of admitted prompts.
        cached_tokens: those of them that were found in the cache.
        prefill_tokens: tokens computed in rows that are no decodes: of prompts, and after a preemption.
        output_tokens: tokens sampled.
        preemptions: requests that gave their units back and began again.
    """

    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    prefill_tokens: int = 0
    output_tokens: int = 0
    preemptions: int = 0


class EngineCore:
    """Requests, scheduler and blocks of one replica.

    Args:
        resolved: what will run.
        executor: the ranks; they are started, and their cache is sized and allocated.

    Raises:
        ModelError: the checkpoint cannot be loaded.
        ConfigError: the cache that was asked for does not fit, or is too small for one request.
    """

    def __init__(self, resolved: Resolved, executor: Executor) -> None:
        self.resolved = resolved
        self._executor = executor
        try:
            self.reports = tuple(executor.start())
            self.plan: CachePlan = plan_cache(self.reports, resolved)
            executor.allocate_cache(self.plan.blocks_per_rank)
        except BaseException:
            executor.shutdown()
            raise
        layout = resolved.cache_layout
        self._keys = KeySpace(layout=layout, kv_dtype=resolved.kv_dtype, model=resolved.model)
        self._cache = CacheManager(
            layout,
            blocks_per_pool=self.plan.blocks_per_rank,
            enable_prefix_caching=resolved.enable_prefix_caching,
        )
        self._scheduler = Scheduler(
            SchedulerConfig(
                max_num_seqs=resolved.max_num_seqs,
                max_num_batched_tokens=resolved.max_num_batched_tokens,
                max_model_len=resolved.max_model_len,
                enable_chunked_prefill=resolved.enable_chunked_prefill,
            ),
            self._cache,
        )
        self._states: dict[int, SequenceState] = {}
        self._next_id = 0
        self._dead: str | None = None
        self.stats = EngineStats()

    @property
    def has_work(self) -> bool:
        """Whether any request is there."""
        return bool(self._states)

    @property
    def free_tokens(self) -> int:
        """Tokens for which the pools of the whole DCP group have room."""
        return self._cache.free_tokens

    def check_request(self, prompt: Sequence[int], params: SamplingParams) -> None:
        """Refuses a request that can never run.

        Args:
            prompt: its token ids.
            params: how its tokens are chosen.

        Raises:
            RequestError: one sentence with the numbers.
        """
        config, limit = self.resolved.model_config, self.resolved.max_model_len
        if not prompt:
            raise RequestError("The prompt is empty: it needs at least one token.")
        if len(prompt) >= limit:
            raise RequestError(
                f"The prompt has {len(prompt)} tokens, which leaves no room for output: "
                f"--max-model-len is {limit}, prompt and output together."
            )
        if outside := [t for t in prompt if not 0 <= t < config.vocab_size]:
            vocabulary = f"the vocabulary has 0 to {config.vocab_size - 1}"
            raise RequestError(f"The prompt has the token id {outside[0]}; {vocabulary}.")
        params.validate(config.vocab_size, eos_token_ids=config.eos_token_ids)

    def add(
        self, prompt: Sequence[int], params: SamplingParams, *, seed: int, cache_salt: str = ""
    ) -> int:
        """Queues a request for one output.

        Args:
            prompt: token ids.
            params: how tokens are chosen; `n` is the caller's affair.
            seed: of its random stream.
            cache_salt: prefixes are shared only with requests of the same salt.

        Returns:
            The engine's number for it.

        Raises:
            RequestError: it can never run.
        """
        self.check_request(prompt, params)
        request_id, self._next_id = self._next_id, self._next_id + 1
        tokens = list(prompt)
        state = SequenceState(
            request_id=request_id,
            tokens=tokens,
            num_prompt_tokens=len(tokens),
            params=params,
            seed=seed,
            keys=self._keys.keys(tokens, cache_salt=cache_salt),
        )
        self._scheduler.add(state)
        self._states[request_id] = state
        return request_id

    def pretend(self, prompt: Sequence[int], *, seed: int) -> Fill | None:
        """Counts a prompt as computed, so that a request with it hits it as a prefix.

        For measurements: the keys and values of its full units have to be made up, and are to stay in
        the cache until the request comes, so the pools must not be full.

        Args:
            prompt: token ids of a prompt that has not been seen.
            seed: of what ranks make up.

        Returns:
            What they have to fill; None, and nothing has changed, when the pools have no room for it.
        """
        request_id, self._next_id = self._next_id, self._next_id + 1
        keys = self._keys.keys(prompt)
        held = self._cache.allocate(request_id, keys, num_tokens=len(prompt), max_hit_tokens=0)
        if held is None:
            return None
        units = tuple(held.units)
        self._cache.register(request_id, num_computed_tokens=len(prompt))
        self._cache.free(request_id)
        return Fill(units, len(prompt), seed)

    def end(self, request_id: int) -> None:
        """Ends a request from outside, at any moment; its blocks are free at once."""
        self._scheduler.abort(request_id)
        self._states.pop(request_id, None)

    def step(self) -> list[Event]:
        """Runs one step.

        Returns:
            What each of its rows gave; nothing if there was nothing to do.

        Raises:
            EngineDeadError: a rank died or hung; every request has ended with it.
        """
        if self._dead is not None:
            raise EngineDeadError(self._dead)
        try:
            return self._step()
        except BaseException as failure:
            # Whatever breaks a step off leaves ranks, scheduler and blocks in unequal states.
            died = isinstance(failure, EngineDeadError)
            self._dead = str(failure) if died else f"A step was broken off by {type(failure).__name__}."
            self._states.clear()
            self._executor.shutdown()
            raise

    def _step(self) -> list[Event]:
        scheduled = self._scheduler.schedule()
        if scheduled is None:
            return []
        self._executor.submit(scheduled.step)
        progress = self._scheduler.update(self._executor.collect())
        self._count(scheduled, progress)
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

    def _event(self, progress: Progress) -> Event:
        state, sampled = progress.state, progress.sampled
        reason, stop_token = self._finish(state, sampled.token_id)
        if reason is not None:
            self._scheduler.finish(state.request_id)
            del self._states[state.request_id]
        return Event(
            request_id=state.request_id,
            token_id=sampled.token_id,
            logprobs=sampled.logprobs,
            prompt_logprobs=sampled.prompt_logprobs,
            finish_reason=reason,
            stop_token=stop_token,
            num_cached_tokens=state.num_cached_tokens or 0,
            num_computed_tokens=state.num_computed_tokens,
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
            if token_id in self.resolved.model_config.eos_token_ids and not params.ignore_eos:
                return FinishReason.STOP, None
        room = self.resolved.max_model_len - state.num_prompt_tokens
        limit = room if params.max_tokens is None else min(room, params.max_tokens)
        return (FinishReason.LENGTH if num_output >= limit else None), None

    def _count(self, scheduled: Scheduled, progress: Sequence[Progress]) -> None:
        prefills = [
            row.num_tokens for row in scheduled.step.rows if row.num_tokens > 1 or not row.sample
        ]
        admitted = [state for i in scheduled.admitted if (state := self._states.get(i))]
        first = [state for state in admitted if not state.num_preemptions]
        old = self.stats
        self.stats = EngineStats(
            steps=old.steps + 1,
            prompt_tokens=old.prompt_tokens + sum(s.num_prompt_tokens for s in first),
            cached_tokens=old.cached_tokens + sum(s.num_cached_tokens or 0 for s in first),
            prefill_tokens=old.prefill_tokens + sum(prefills),
            output_tokens=old.output_tokens + sum(p.sampled.token_id is not None for p in progress),
            preemptions=old.preemptions + len(scheduled.preempted),
        )


def stream_seed(*parts: int) -> int:
    """The seed of one request's random stream, from whatever tells it apart; 0..2^63-1.

    Args:
        parts: e.g. (the request's own seed, index of the output).
    """
    digest = blake2b(",".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
