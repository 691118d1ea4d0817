"""Prompts in, outputs out: the core with text on both sides. Knows no threads and no HTTP."""

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral

from kvspan.engine.core import EngineCore, Event, stream_seed
from kvspan.engine.interrupts import held_back
from kvspan.engine.text import NoText, OutputText, named_logprobs
from kvspan.errors import RequestError
from kvspan.loading.tokenizer import Tokenizer
from kvspan.request import Logprob, RequestOutput, SamplingParams

Prompt = str | Sequence[int] | Mapping[str, str | Sequence[int]]
"""Text, token ids, or a mapping with one of `prompt` and `prompt_token_ids`."""


@dataclass(slots=True, kw_only=True)
class Generation:
    """A request as the user sees it: one prompt, n outputs.

    Args:
        request_id: the caller's name for it.
        prompt: its text; None if it came as token ids.
        prompt_ids: its token ids.
        params: how tokens are chosen.
        outputs: by the engine's number, in order of their index.
        prompt_logprobs: of the prompt's tokens, as far as they have come.
        num_cached_tokens: tokens of the prompt that were found in the cache.
        num_computed_tokens: tokens of prompt and first output that are in the cache by now.
        listener: gets every piece of this request, whoever runs the step that makes it.
    """

    request_id: str
    prompt: str | None
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    outputs: dict[int, OutputText] = field(default_factory=dict)
    prompt_logprobs: list[dict[int, Logprob] | None] = field(default_factory=lambda: [None])
    num_cached_tokens: int = 0
    num_computed_tokens: int = 0
    listener: deque["Piece"] | None = None

    @property
    def finished(self) -> bool:
        """Whether all outputs have ended."""
        return all(output.finish_reason is not None for output in self.outputs.values())

    def result(self) -> RequestOutput:
        """What it gave so far."""
        asked = self.params.prompt_logprobs is not None
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_ids,
            outputs=tuple(output.output() for output in self.outputs.values()),
            finished=self.finished,
            prompt_logprobs=tuple(self.prompt_logprobs) if asked else None,
            num_cached_tokens=self.num_cached_tokens,
        )


@dataclass(frozen=True, slots=True)
class Piece:
    """What a step added to one output.

    Args:
        generation: whose output it is.
        index: which of the n.
        text: the text that became certain; joined, the pieces are the output's text.
    """

    generation: Generation
    index: int
    text: str


class Engine:
    """A model that serves requests, step by step. Threads may share it: each call is whole.

    Args:
        core: scheduler, blocks and ranks.
        tokenizer: of the model; None = there is none, and prompts are token ids.
    """

    def __init__(self, core: EngineCore, tokenizer: Tokenizer | None) -> None:
        self.core = core
        self.tokenizer = tokenizer
        self._decoder = tokenizer or NoText()
        self._by_core_id: dict[int, Generation] = {}
        self._num_requests = 0
        self._lock = threading.RLock()

    @property
    def has_work(self) -> bool:
        """Whether any request is there."""
        return self.core.has_work

    def prepare(self, prompt: Prompt, params: SamplingParams) -> Generation:
        """A request that can run, not queued yet.

        Args:
            prompt: text, token ids, or a mapping with `prompt` or `prompt_token_ids`.
            params: how tokens are chosen.

        Raises:
            RequestError: it can never run; one sentence with the numbers.
        """
        text, ids = self._read(prompt)
        if params.stop and self.tokenizer is None:
            raise RequestError(
                "Stop strings need a tokenizer, and this model has none; use stop_token_ids."
            )
        self.core.check_request(ids, params)
        with self._lock:
            request_id, self._num_requests = str(self._num_requests), self._num_requests + 1
        return Generation(request_id=request_id, prompt=text, prompt_ids=tuple(ids), params=params)

    def start(self, generation: Generation) -> None:
        """Queues a request, each of its n outputs on its own; they share the prompt's blocks."""
        params = generation.params
        own = (self.core.resolved.seed, int(generation.request_id))
        with self._lock, held_back():
            for index in range(params.n):
                seed = stream_seed(*(own if params.seed is None else (params.seed,)), index)
                core_id = self.core.add(generation.prompt_ids, params, seed=seed)
                generation.outputs[core_id] = OutputText(
                    index, decoder=self._decoder, params=params, prompt_ids=generation.prompt_ids
                )
                self._by_core_id[core_id] = generation

    def step(self) -> list[Piece]:
        """Runs one step: what it added, one entry for each output that got something.

        Raises:
            EngineDeadError: a rank died or hung; every request has ended with it.
        """
        with self._lock, held_back():
            return [self._take(event) for event in self.core.step()]

    def abort(self, generation: Generation) -> None:
        """Ends a request at any moment; its blocks are free at once."""
        with self._lock, held_back():
            for core_id, output in generation.outputs.items():
                self.core.end(core_id)
                self._by_core_id.pop(core_id, None)
                output.abort()

    def shutdown(self) -> None:
        """Ends all ranks; a second call does nothing."""
        self.core.shutdown()

    def _read(self, prompt: Prompt) -> tuple[str | None, Sequence[int]]:
        """A prompt's text, if it is text, and its token ids."""
        if isinstance(prompt, Mapping):
            if len(prompt) != 1 or not prompt.keys() <= {"prompt", "prompt_token_ids"}:
                raise RequestError(
                    'A prompt given as a mapping has one key, "prompt" or "prompt_token_ids"; '
                    f"got {sorted(map(str, prompt))}."
                )
            (prompt,) = prompt.values()
        if not isinstance(prompt, str):
            return None, _token_ids(prompt)
        if self.tokenizer is None:
            raise RequestError("This model has no tokenizer: give the prompt as token ids.")
        if any("\ud800" <= character <= "\udfff" for character in prompt):
            raise RequestError("The prompt is no Unicode text: it has half of a surrogate pair.")
        return prompt, self.tokenizer.encode(prompt)

    def _take(self, event: Event) -> Piece:
        generation = self._by_core_id[event.request_id]
        output = generation.outputs[event.request_id]
        first = next(iter(generation.outputs))
        if event.request_id == first:
            generation.num_computed_tokens = event.num_computed_tokens
            named = (named_logprobs(each, self._decoder) for each in event.prompt_logprobs)
            generation.prompt_logprobs.extend(named)
            generation.num_cached_tokens = event.num_cached_tokens
        text = output.push(event)
        if output.finish_reason is not None:
            self.core.end(event.request_id)  # a stop string ends what the core thinks goes on
            del self._by_core_id[event.request_id]
        piece = Piece(generation, list(generation.outputs).index(event.request_id), text)
        if generation.listener is not None:
            generation.listener.append(piece)
        return piece


def _token_ids(prompt: object) -> list[int]:
    """Token ids as plain numbers; whatever else comes from outside is refused."""
    if not isinstance(prompt, Sequence) or isinstance(prompt, (str, bytes)):
        raise RequestError(f"A prompt is text or a list of token ids, not {type(prompt).__name__}.")
    for token in prompt:
        if isinstance(token, bool) or not isinstance(token, Integral):
            raise RequestError(f"A prompt of token ids has {token!r}, which is not a whole number.")
    return [int(token) for token in prompt]
