"""The API for event loops: `AsyncLLM(model)`, whose engine runs in a process of its own.

Tokens become text in this process and stop strings are found here, so that neither delays a step.
"""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from kvspan.cache.prefix import KeySpace
from kvspan.clock import Clock, WallClock
from kvspan.config.engine import EngineConfig
from kvspan.config.environment import replica_environment
from kvspan.config.resolved import Resolved
from kvspan.engine.checks import check_request
from kvspan.engine.core import stream_seed
from kvspan.engine.generation import Generation, Prompt, read_prompt
from kvspan.engine.health import Health, together
from kvspan.engine.held import place_of
from kvspan.engine.messages import Add, Chosen, Ready, Seen
from kvspan.engine.meter import Meter
from kvspan.engine.observer import EndedRequest, Observer
from kvspan.engine.replica import ENGINE_TIMEOUT_S, Care, Replica
from kvspan.engine.routing import Router
from kvspan.engine.stream import RequestStream
from kvspan.engine.text import NoText, OutputText
from kvspan.errors import EngineDeadError, KvspanError, RequestError, blaming
from kvspan.loading.tokenizer import Tokenizer, find_tokenizer
from kvspan.metrics import Registry
from kvspan.request import FinishReason, RequestOutput, SamplingParams
from kvspan.sampling.grammar import Grammars
from kvspan.step import pack_tokens
from kvspan.unicode import check_unicode

MAX_RESTARTS = 3
"""How often lost ranks, or a lost engine, are started again within ten minutes, if nobody says."""


class AsyncLLM:
    """A model behind an event loop. `async with AsyncLLM(model) as llm: ...` starts and ends it.

    Args:
        model: a Hugging Face directory, a `.gguf` file, a built-in name or a hub id.
        max_restarts: how often lost ranks, or a lost engine, are started again within ten minutes.
        engine_timeout_s: silence after which the engine's process counts as hung, and is lost.
        options: those of `kvspan serve --help`, with underscores.

    Raises:
        ConfigError: an option is unknown, or a value is not one that it takes.
    """

    def __init__(
        self,
        model: str,
        *,
        max_restarts: int = MAX_RESTARTS,
        engine_timeout_s: float = ENGINE_TIMEOUT_S,
        **options: Any,
    ) -> None:
        config = EngineConfig.from_mapping({"model": model, **options})
        self._prepare(config, max_restarts, engine_timeout_s, profile=False, observer=None)

    @classmethod
    def from_config(
        cls,
        config: EngineConfig,
        *,
        max_restarts: int = MAX_RESTARTS,
        engine_timeout_s: float = ENGINE_TIMEOUT_S,
        profile: bool = False,
        observer: Observer | None = None,
    ) -> Self:
        """The same from options that have been read already.

        Args:
            config: options.
            max_restarts: how often lost ranks, or a lost engine, are started again in ten minutes.
            engine_timeout_s: silence after which the engine's process counts as hung, and is lost.
            profile: whether a step is taken apart now and then; it costs all steps some percent.
            observer: is told of every request that has ended.
        """
        llm = cls.__new__(cls)
        llm._prepare(config, max_restarts, engine_timeout_s, profile=profile, observer=observer)
        return llm

    async def start(self, told: Callable[[Resolved], None] = lambda _: None) -> Ready:
        """Starts the engine.

        Args:
            told: called with what will run, before it is started.

        Returns:
            What its ranks report, and what their caches hold.

        Raises:
            ModelError: the model cannot be found or read.
            ConfigError: it cannot run as asked.
        """
        first, *others = self._replicas
        try:
            ready, *_ = await asyncio.gather(
                first.start(lambda chosen: self._begin(chosen, told)),
                *(replica.start() for replica in others),
            )
        except BaseException:
            await self.shutdown()
            raise
        return ready

    @property
    def resolved(self) -> Resolved:
        """What runs, and why."""
        if self._replicas[0].chosen is None:
            raise EngineDeadError("The engine has not been started.")
        return self._replicas[0].chosen.resolved

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer, if it has one."""
        return self._tokenizer

    @property
    def health(self) -> Health:
        """Whether it works on requests, and what it is busy with; of several replicas, all together."""
        return together(self.healths)

    @property
    def healths(self) -> list[Health]:
        """The same of each replica."""
        return [replica.health for replica in self._replicas]

    @property
    def num_unfinished(self) -> int:
        """Outputs that are being worked on, or wait."""
        return sum(replica.num_unfinished for replica in self._replicas)

    @property
    def num_places(self) -> int:
        """Outputs that can be worked on at a time."""
        return self.resolved.max_num_seqs * len(self._replicas)

    def metrics(self) -> Registry:
        """Everything that is measured, as of now."""
        for replica in self._replicas:
            replica.measure()
        return self.meter.registry

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer.

        Raises:
            RequestError: it has none.
        """
        if self._tokenizer is None:
            raise RequestError("This model has no tokenizer: it takes and gives token ids.")
        return self._tokenizer

    def add(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        prompt_text: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
        trace_headers: Mapping[str, str] | None = None,
    ) -> RequestStream:
        """Queues a request.

        Args:
            prompt: text, token ids, or a mapping with `prompt` or `prompt_token_ids`.
            params: how tokens are chosen.
            prompt_text: the text of token ids, for the record.
            priority: the lower value runs first, and is preempted last.
            cache_salt: prefixes are shared only with requests of the same salt.
            trace_headers: of the call that it comes from, for the observer.

        Returns:
            Its pieces as they come. If it is left before its end it must be aborted.

        Raises:
            RequestError: it can never run; one sentence with the numbers.
            EngineDeadError: there is no engine to run it, and none is being started again.
        """
        text, ids = self._read(prompt, params, cache_salt)
        text = text or prompt_text
        return self._queue(text, ids, params, priority, cache_salt, trace_headers or {})

    def add_all(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str = "",
        trace_headers: Mapping[str, str] | None = None,
    ) -> list[RequestStream]:
        """Queues a request for each prompt, or none: what is refused leaves no trace of those before it.

        Args:
            prompts: as for `add`.
            params: of all of them.
            priority: as for `add`, like the others.
            cache_salt: see there.
            trace_headers: see there.

        Raises:
            RequestError: one of them can never run.
            EngineDeadError: there is no engine to run them, and none is being started again.
        """
        found = [self._read(prompt, params, cache_salt) for prompt in prompts]
        headers = trace_headers or {}
        return [self._queue(text, ids, params, priority, cache_salt, headers) for text, ids in found]

    def check_form(self, params: SamplingParams) -> None:
        """Refuses a form that outputs cannot be held to. It takes a while when a large one is new.

        Raises:
            RequestError: says why.
        """
        if params.structured_outputs is not None and self._grammars is not None:
            self._grammars.check(params.structured_outputs)

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        cache_salt: str = "",
    ) -> AsyncIterator[RequestOutput]:
        """Completes a prompt.

        Args:
            prompt: text, token ids, or a mapping with `prompt` or `prompt_token_ids`.
            sampling_params: how tokens are chosen.
            priority: the lower value runs first, and is preempted last.
            cache_salt: prefixes are shared only with requests of the same salt.

        Yields:
            The whole output so far, whenever something was added. Leaving early aborts the request.

        Raises:
            RequestError: it can never run; one sentence with the numbers.
            OutputError: it cannot be finished, and would not be if it were asked again.
            EngineDeadError: the engine was lost.
        """
        params = sampling_params or SamplingParams()
        stream = self.add(prompt, params, priority=priority, cache_salt=cache_salt)
        try:
            async for _ in stream:
                yield stream.generation.result()
        finally:
            stream.abort()

    async def look(self, *, patience_s: float) -> list[Seen | None]:
        """What each replica looks like, between two steps.

        Args:
            patience_s: for those that are busy with one long step, or with starting their ranks again.

        Returns:
            One entry a replica; None = it has not said anything in time, or is not there.
        """

        async def one(replica: Replica) -> Seen | None:
            try:
                return await asyncio.wait_for(replica.look(), patience_s)
            except (EngineDeadError, TimeoutError):
                return None

        return await asyncio.gather(*map(one, self._replicas))

    async def shutdown(self) -> None:
        """Ends the engine and its ranks; a second call does nothing."""
        await asyncio.gather(*(replica.shutdown() for replica in self._replicas))

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.shutdown()

    def _prepare(
        self,
        config: EngineConfig,
        max_restarts: int,
        engine_timeout_s: float,
        *,
        profile: bool,
        observer: Observer | None,
    ) -> None:
        self._clock: Clock = WallClock()
        self._observer = observer
        self.meter = Meter(Registry(), self._clock)
        count = config.data_parallel_size
        num_ranks = config.tensor_parallel_size * config.prefill_context_parallel_size
        self._router: Router | None = None
        self._replicas = [
            Replica(
                _asked(config),
                Care(
                    max_restarts=max_restarts,
                    engine_timeout_s=engine_timeout_s,
                    profile=profile,
                    environment=replica_environment(number, num_replicas=count, num_ranks=num_ranks),
                ),
                clock=self._clock,
                meter=self.meter,
                name=str(number),
                begun=partial(self._forget, number),
                freed=partial(self._fill, number),
                left=self._move,
            )
            for number in range(count)
        ]
        self._tokenizer: Tokenizer | None = None
        self._decoder: Tokenizer | NoText = NoText()
        self._grammars: Grammars | None = None
        self._request_numbers = itertools.count()
        self._output_numbers = itertools.count()

    def _read(
        self, prompt: Prompt, params: SamplingParams, cache_salt: str
    ) -> tuple[str | None, list[int]]:
        """A prompt's text, if it is text, and its token ids, unless they can never run."""
        text, ids = read_prompt(prompt, params, self._tokenizer)
        check_request(self.resolved, ids, params)
        with blaming("structured_outputs"):
            self.check_form(params)
        with blaming("cache_salt"):
            check_unicode("cache_salt", cache_salt)
        return text, ids

    def _queue(
        self,
        text: str | None,
        ids: Sequence[int],
        params: SamplingParams,
        priority: int,
        cache_salt: str,
        headers: Mapping[str, str],
    ) -> RequestStream:
        """Queues a request that has been checked."""
        replica = self._choose(ids, cache_salt)
        replica.refuse_if_gone()
        number = next(self._request_numbers)
        generation = Generation(
            request_id=str(number), prompt=text, prompt_ids=tuple(ids), params=params
        )
        packed, orders = pack_tokens(ids), []
        own = (self.resolved.seed, number)
        for index in range(params.n):
            seed = stream_seed(*(own if params.seed is None else (params.seed,)), index)
            request_id = next(self._output_numbers)
            orders.append(Add(request_id, packed, len(ids), params, seed, cache_salt, priority))
            generation.outputs[request_id] = OutputText(
                index, decoder=self._decoder, params=params, prompt_ids=generation.prompt_ids
            )
        stream = RequestStream(
            generation,
            decoder=self._decoder,
            abort=partial(self._abort, generation),
            timings={order.request_id: self.meter.arrived(len(ids)) for order in orders},
            ended=partial(self._take_end, headers),
        )
        replica.add(stream, orders)
        return stream

    def _choose(self, prompt: Sequence[int], cache_salt: str) -> Replica:
        """The replica for a request; a lost one gets none while there is another.

        While none is there, requests wait for those that are being started again.
        """
        numbered = dict(enumerate(self._replicas))
        taking = {n: replica for n, replica in numbered.items() if replica.takes_requests}
        working = {n: replica for n, replica in taking.items() if replica.health.ready}
        returning = {n: replica for n, replica in numbered.items() if replica.is_returning}
        best = working or taking or returning or numbered
        if len(best) == 1 or self._router is None or best is numbered:
            return next(iter(best.values()))
        free = {n: r for n, r in best.items() if self._num_free(r) > 0} or best
        busy = {n: (r.num_prompt_tokens, r.num_unfinished) for n, r in free.items()}
        return numbered[self._router.choose(prompt, cache_salt=cache_salt, busy=busy)]

    def _num_free(self, replica: Replica) -> int:
        """Outputs that a replica could work on beside those that it has; negative where some wait."""
        return self.resolved.max_num_seqs - replica.num_unfinished

    def _move(self, stream: RequestStream, orders: Sequence[Add], may_wait: bool) -> bool:
        """Gives a request whose engine was lost to another one; whether there is any.

        Where all others are full it goes to none of them if it may wait: its own engine may be back
        before a place is free (`_fill`).
        """
        replica = self._choose(stream.generation.prompt_ids, orders[0].cache_salt)
        if not replica.takes_requests or (may_wait and self._num_free(replica) <= 0):
            return False
        replica.go_on(stream, orders)
        return True

    def _fill(self, number: int) -> None:
        """Gives a replica, for as long as it has places free, requests that wait for others to be back.

        Those that were first in line are first. The rest goes on to wait, for the replica that is back
        first or for the next place.
        """
        replica = self._replicas[number]
        if not replica.health.ready or self._num_free(replica) <= 0:
            return
        waiting = [(*request, other) for other in self._replicas for request in other.stranded]
        for stream, orders, other in sorted(waiting, key=lambda each: place_of(each[1])):
            if self._num_free(replica) <= 0:
                return
            other.hand_over(stream)
            replica.go_on(stream, orders)
            if self._router is not None:
                prompt = stream.generation.prompt_ids
                self._router.remember(number, prompt, cache_salt=orders[0].cache_salt)

    def _abort(self, generation: Generation) -> None:
        """Ends a request, whichever replica has it."""
        for replica in self._replicas:
            replica.abort(tuple(generation.outputs))

    def _take_end(
        self, headers: Mapping[str, str], stream: RequestStream, error: KvspanError | None
    ) -> None:
        """Counts the outputs that no step has ended, and tells whoever follows requests."""
        for request_id, output in stream.generation.outputs.items():
            if output.finish_reason in (None, FinishReason.ABORT):
                reason = FinishReason.ABORT if error is None else FinishReason.ERROR
                self.meter.ended(stream.timings[request_id], reason, output.num_tokens)
        if self._observer is None:
            return
        ended = EndedRequest(
            model=self.resolved.model,
            generation=stream.generation,
            timings=tuple(stream.timings.values()),
            ended_s=self._clock.now_s(),
            error=error,
            trace_headers=headers,
        )
        self._observer.ended(ended)

    def _forget(self, number: int) -> None:
        if self._router is not None:
            self._router.forget(number)

    def _begin(self, chosen: Chosen, told: Callable[[Resolved], None]) -> None:
        self._tokenizer = find_tokenizer(Path(chosen.tokenizer_path))
        self._decoder = self._tokenizer or NoText()
        as_json = self._tokenizer.to_json if self._tokenizer else None
        if self._grammars is None:
            self._grammars = Grammars.of_model(chosen.resolved.model_config, as_json)
            self._grammars.warm()  # the ranks load their weights, and nobody waits for this process
        resolved = chosen.resolved
        keys = KeySpace(layout=resolved.cache_layout, kv_dtype=resolved.kv_dtype, model=resolved.model)
        self._router = Router(keys, len(self._replicas))
        told(resolved)


def _asked(config: EngineConfig) -> Mapping[str, Any]:
    return {each.name: getattr(config, each.name) for each in fields(config)}
