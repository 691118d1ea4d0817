"""Engines that share out what is asked of one machine: an engine, or replicas, each driven by a thread.

A request goes to the engine that has fewest prompt tokens under way, which is what a server with
replicas does with prompts that nobody has seen. Knows schedules and engines; knows no layouts.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from kvspan.bench.contender import Case, Contender, Steps
from kvspan.bench.offline import replay_offline
from kvspan.bench.record import Observed, Record
from kvspan.bench.schedule import Due, Schedule
from kvspan.config.engine import EngineConfig
from kvspan.engine.events import EngineStats
from kvspan.errors import ConfigError
from kvspan.trace.row import Trace

T = TypeVar("T")

POLL_S = 2e-3
"""Between two looks of an engine with nothing to do whether there is something for it."""


class Fleet:
    """One engine or several alike.

    Args:
        name: for tables.
        configs: of the engines.

    Raises:
        ConfigError: one cannot run as asked.
        ModelError: the model cannot be found or read.
    """

    def __init__(self, name: str, configs: Sequence[EngineConfig]) -> None:
        self.name = name
        self.engines: list[Contender] = []
        try:
            for config in configs:
                self.engines.append(Contender(config, name=name))
        except BaseException:
            self.shutdown()
            raise

    @property
    def stats(self) -> EngineStats:
        """Counters of all engines."""
        every = [engine.core.stats for engine in self.engines]
        return EngineStats(
            steps=sum(s.steps for s in every),
            output_tokens=sum(s.output_tokens for s in every),
            preemptions=sum(s.preemptions for s in every),
            exchange_steps=sum(s.exchange_steps for s in every),
            shared_steps=sum(s.shared_steps for s in every),
            team_steps=sum(s.team_steps for s in every),
            spills=sum(s.spills for s in every),
        )

    def fill(self, case: Case, *, num_steps: int, seed: int) -> None:
        """Makes up keys and values of a case's prompts, each engine its part of the batch.

        Raises:
            ConfigError: there are fewer sequences than engines, or a cache does not hold its part.
        """
        if case.batch < len(self.engines):
            raise ConfigError(
                f"--batch {case.batch} leaves some of {len(self.engines)} replicas without a sequence: "
                f"raise it to at least {len(self.engines)}."
            )
        whole, left = divmod(case.batch, len(self.engines))
        for number, engine in enumerate(self.engines):
            part = Case(case.context, whole + (number < left))
            engine.fill(part, num_steps=num_steps, seed=seed + (number << 16))

    def decode(self, num_steps: int) -> list[float]:
        """Seconds of each step of each engine, all decoding side by side."""
        found: list[Steps] = self._each(lambda engine: engine.decode(num_steps))
        return [s for steps in found for s in steps.seconds]

    def replay(
        self, trace: Trace, schedule: Schedule, *, seed: int, stop_s: float = float("inf")
    ) -> Observed:
        """Replays a trace; what runs after `stop_s` seconds is ended.

        Args:
            trace: the rows.
            schedule: says which is sent when.
            seed: of prompts.
            stop_s: when to end it.
        """
        shared = Shared(schedule, trace, len(self.engines))
        views = [View(shared, number) for number in range(len(self.engines))]

        def one(engine: Contender) -> Observed:
            view = views[self.engines.index(engine)]
            try:
                return replay_offline(engine.core, trace, view, seed=seed, stop_s=stop_s)
            except BaseException:
                shared.is_broken = True  # or the others would wait for its answers
                raise

        return together(self._each(one))

    def shutdown(self) -> None:
        """Ends all engines."""
        for engine in self.engines:
            engine.shutdown()

    def _each(self, do: Callable[[Contender], T]) -> list[T]:
        with ThreadPoolExecutor(len(self.engines)) as pool:
            return [each.result() for each in [pool.submit(partial(do, e)) for e in self.engines]]


@dataclass(slots=True)
class Shared:
    """A schedule whose requests several engines take.

    Args:
        schedule: the whole.
        trace: its rows.
        num_engines: that share it out.
    """

    schedule: Schedule
    trace: Trace
    num_engines: int
    lock: threading.Lock = field(default_factory=threading.Lock, init=False)
    due: list[list[Due]] = field(init=False)
    busy_tokens: list[int] = field(init=False)
    num_busy: list[int] = field(init=False)
    now_s: float = field(default=0.0, init=False)
    is_broken: bool = field(default=False, init=False)
    """Whether an engine has failed, so that nothing more is dealt out."""

    def __post_init__(self) -> None:
        self.due = [[] for _ in range(self.num_engines)]
        self.busy_tokens, self.num_busy = [0] * self.num_engines, [0] * self.num_engines

    def deal_out(self, now_s: float) -> None:
        """Gives what is due to the engines that have least under way."""
        self.now_s = now_s
        for due in () if self.is_broken else self.schedule.take(now_s):
            idlest = min(
                range(self.num_engines), key=lambda n: (self.busy_tokens[n], self.num_busy[n], n)
            )
            self.due[idlest].append(due)
            self.busy_tokens[idlest] += self.trace.rows[due.index].input_length
            self.num_busy[idlest] += 1


@dataclass(frozen=True, slots=True)
class View:
    """One engine's part of a shared schedule; see `Schedule`.

    Args:
        shared: the whole.
        number: of the engine.
    """

    shared: Shared
    number: int

    @property
    def drained(self) -> bool:
        """Whether fewer requests are left in all than would be under way."""
        with self.shared.lock:
            return self.shared.schedule.drained

    def take(self, now_s: float) -> list[Due]:
        """The engine's requests that are due by now, each once."""
        with self.shared.lock:
            self.shared.deal_out(now_s)
            mine, self.shared.due[self.number] = self.shared.due[self.number], []
            return mine

    def next_s(self) -> float | None:
        """Soon, as long as others' answers may bring more; None = nothing will come."""
        with self.shared.lock:
            shared = self.shared
            if shared.is_broken:
                return None
            next_s = shared.schedule.next_s()
            if next_s is None and any(shared.num_busy):
                return shared.now_s + POLL_S
            return next_s

    def ended(self, index: int, now_s: float) -> None:
        """A request has its answer, or an error."""
        with self.shared.lock:
            self.shared.busy_tokens[self.number] -= self.shared.trace.rows[index].input_length
            self.shared.num_busy[self.number] -= 1
            self.shared.schedule.ended(index, now_s)


def together(observed: Sequence[Observed]) -> Observed:
    """What several engines did side by side, as one run.

    It counts from its beginning: traces are short here, and between the first answers and the last
    questions there would be other requests with one rival than with another.

    Args:
        observed: of each, from the same moment on.
    """
    records: list[Record] = sorted(
        (record for each in observed for record in each.records), key=lambda r: r.sent_s
    )
    drained = [each.drained_s for each in observed if each.drained_s is not None]
    return Observed(
        records=records,
        samples=sorted((s for each in observed for s in each.samples), key=lambda s: s.start_s),
        preemptions=sum(each.preemptions or 0 for each in observed),
        drained_s=min(drained, default=None),
        started_s=min(each.started_s for each in observed),
        end_s=max(each.end_s for each in observed),
        interrupted=any(each.interrupted for each in observed),
    )
