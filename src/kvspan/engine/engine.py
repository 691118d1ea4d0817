"""Prompts in, outputs out: the core with text on both sides. Knows no threads and no HTTP."""

import threading

from kvspan.engine.core import EngineCore, stream_seed
from kvspan.engine.events import Event
from kvspan.engine.generation import Generation, Piece, Prompt, read_prompt
from kvspan.engine.interrupts import held_back
from kvspan.engine.text import NoText, OutputText
from kvspan.loading.tokenizer import Tokenizer
from kvspan.request import SamplingParams


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
        text, ids = read_prompt(prompt, params, self.tokenizer)
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
            for core_id in generation.outputs:
                self.core.end(core_id)
                self._by_core_id.pop(core_id, None)
            generation.abort()

    def shutdown(self) -> None:
        """Ends all ranks; a second call does nothing."""
        self.core.shutdown()

    def _take(self, event: Event) -> Piece:
        generation = self._by_core_id[event.request_id]
        piece = generation.take(event, self._decoder)
        if generation.outputs[event.request_id].finish_reason is not None:
            self.core.end(event.request_id)  # a stop string ends what the core thinks goes on
            del self._by_core_id[event.request_id]
        if generation.listener is not None:
            generation.listener.append(piece)
        return piece
