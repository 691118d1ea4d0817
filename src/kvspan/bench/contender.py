"""One layout's engine, as it stands in a measurement of decoding beside others.

It is the engine that serves: scheduler, ranks, sampler and detokeniser take part in every step. Only the
keys and values of prompts are made up instead of computed, so that long contexts cost no prefill.
"""

from collections import defaultdict
from dataclasses import dataclass, field

import msgspec
import numpy as np

from kvspan.clock import WallClock
from kvspan.config.engine import EngineConfig
from kvspan.engine.build import make_executor, resolve_engine
from kvspan.engine.core import EngineCore
from kvspan.engine.engine import Engine
from kvspan.engine.generation import Generation
from kvspan.errors import ConfigError
from kvspan.request import SamplingParams
from kvspan.step import TimedSpan

WARM_TOKENS = 3
"""Tokens that each sequence has before steps count: by then all rows decode and buffers are there."""
ROOM_TOKENS = WARM_TOKENS + 5
"""Tokens beside the context and the counted steps, to size the cache by."""
_GREEDY = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=None)


class Case(msgspec.Struct, frozen=True):
    """What is decoded.

    Args:
        context: tokens of each prompt.
        batch: sequences.
    """

    context: int
    batch: int


@dataclass(frozen=True, slots=True)
class Steps:
    """Steps in which all sequences of a case decoded.

    Args:
        seconds: of each.
        spans: of each rank, in those steps; empty if nobody watched.
    """

    seconds: list[float]
    spans: list[list[TimedSpan]] = field(default_factory=list)

    def own_ms(self) -> dict[str, float]:
        """What rank 0 spent a step on, in milliseconds; `engine` is what was not the rank's."""
        own_s: dict[str, float] = defaultdict(float)
        for span in self.spans[0]:
            own_s[span.name] += span.own_s
        own_s["engine"] = sum(self.seconds) - sum(own_s.values())
        return {name: total * 1e3 / len(self.seconds) for name, total in own_s.items()}


class Contender:
    """A running engine.

    Args:
        config: what runs.
        name: of the layout; empty = made from what runs.
        watched: whether its ranks can say where their time goes.

    Raises:
        ModelError: the model cannot be found or read.
        ConfigError: it cannot run as asked.
    """

    def __init__(self, config: EngineConfig, *, name: str = "", watched: bool = False) -> None:
        resolved, tokenizer = resolve_engine(config)
        self._executor = make_executor(resolved, watched=watched)
        self._engine = Engine(EngineCore(resolved, self._executor), tokenizer)
        self._clock = WallClock()
        self._prompts: list[list[int]] = []
        self._running: list[Generation] = []
        self.resolved = resolved
        self.name = name or (
            f"-tp {resolved.tp_size} -dcp {resolved.dcp_size} --num-threads {resolved.num_threads}"
        )

    @property
    def core(self) -> EngineCore:
        """What decides in it."""
        return self._engine.core

    def fill(self, case: Case, *, num_steps: int, seed: int) -> None:
        """Makes up the keys and values of a case's prompts.

        Args:
            case: what is to be decoded.
            num_steps: that will be counted at a time.
            seed: of prompts and of what is made up; not used before.

        Raises:
            ConfigError: the cache does not hold them all.
        """
        self._check_room(case, num_steps)
        draw = np.random.default_rng(seed)
        size = (case.batch, case.context)
        self._prompts = draw.integers(0, self.resolved.model_config.vocab_size, size).tolist()
        fills = self.core.pretend(self._prompts, seed=seed)
        assert fills is not None, "there was room"
        for fill in fills:
            self._executor.fill(fill)

    def compute(self, prompt: list[int]) -> float:
        """Prefills a prompt that has not been seen, for real.

        Returns:
            Seconds until its first token.
        """
        generation = self._engine.prepare(prompt, _GREEDY)
        start_s = self._clock.now_s()
        self._engine.start(generation)
        try:
            while _num_tokens(generation) < 1:
                self._engine.step()
            return self._clock.now_s() - start_s
        finally:
            self._engine.abort(generation)

    def decode(self, num_steps: int, *, watching: bool = False) -> Steps:
        """Decodes what was filled, from its beginning.

        Args:
            num_steps: steps to count.
            watching: whether ranks note where their time goes.
        """
        self.start()
        try:
            if watching:
                self._executor.watch(True)
            seconds = [self._step_s() for _ in range(num_steps)]
            return Steps(seconds, self._executor.watch(False) if watching else [])
        finally:
            self.stop()

    def start(self) -> None:
        """Starts what was filled, and has all sequences decode."""
        self._running = [self._engine.prepare(prompt, _GREEDY) for prompt in self._prompts]
        for generation in self._running:
            self._engine.start(generation)
        while min(map(_num_tokens, self._running)) < WARM_TOKENS:
            self._engine.step()
        self._check_hits()

    def step(self) -> None:
        """A step in which all sequences decode."""
        pieces = self._engine.step()
        assert len(pieces) == len(self._prompts), "every sequence decodes in every step"

    def stop(self) -> None:
        """Ends what was started; what was filled stays."""
        for generation in self._running:
            self._engine.abort(generation)

    def shutdown(self) -> None:
        """Ends all ranks."""
        self._engine.shutdown()

    def _step_s(self) -> float:
        start_s = self._clock.now_s()
        self.step()
        return self._clock.now_s() - start_s

    def _check_room(self, case: Case, num_steps: int) -> None:
        layout, plan = self.resolved.cache_layout, self.core.plan
        tokens = layout.num_units(case.context + num_steps + ROOM_TOKENS) * layout.unit_tokens
        if case.batch * tokens > plan.tokens_total:
            raise ConfigError(
                f"{case.batch} sequences of {case.context} tokens and what they decode take "
                f"{case.batch * tokens} tokens of KV cache, and {self.name} holds {plan.tokens_total}: "
                "raise --kv-cache-memory, or lower --batch or --context."
            )

    def _check_hits(self) -> None:
        unit = self.resolved.cache_layout.unit_tokens
        for generation in self._running:
            missed = len(generation.prompt_ids) - generation.num_cached_tokens
            assert missed <= unit, f"{missed} tokens of a prompt were computed and not made up"


def _num_tokens(generation: Generation) -> int:
    return min(output.num_tokens for output in generation.outputs.values())
