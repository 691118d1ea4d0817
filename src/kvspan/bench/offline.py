"""Replays a trace on an engine of this process: no HTTP, no text, and every step is seen."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from kvspan.bench.record import Observed, Record, Sample
from kvspan.bench.schedule import Due, Schedule
from kvspan.clock import Clock, WallClock
from kvspan.engine.core import EngineCore
from kvspan.engine.events import Event
from kvspan.errors import RequestError
from kvspan.request import SamplingParams
from kvspan.trace.row import Trace, TraceRow
from kvspan.trace.tokens import TokenSource

Told = Callable[[Observed, float], None]
"""Called after each step with what was observed so far, and the seconds since the start."""


def replay_offline(
    core: EngineCore,
    trace: Trace,
    schedule: Schedule,
    *,
    users: int = 0,
    seed: int = 0,
    stop_s: float = float("inf"),
    clock: Clock | None = None,
    told: Told = lambda *_: None,
) -> Observed:
    """Replays a trace; Ctrl-C ends it, and what was measured by then is returned.

    Args:
        core: an engine without requests.
        trace: the rows.
        schedule: says which is sent when.
        users: of a closed loop, to tell when each has been answered once.
        seed: of prompts.
        stop_s: seconds after which nothing more is sent, and what runs is aborted.
        clock: what time it is.
        told: e.g. draws a progress bar.

    Raises:
        EngineDeadError: a rank died or hung.
    """
    replay = _Replay(core, trace, schedule, users, seed, clock or WallClock())
    with _interruptible(replay.observed):
        while replay.now_s() < stop_s and replay.step():
            told(replay.observed, replay.now_s())
    return replay.finish()


@contextmanager
def _interruptible(observed: Observed) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        observed.interrupted = True


class _Replay:
    """The loop's state: which requests of the engine are which rows."""

    def __init__(
        self, core: EngineCore, trace: Trace, schedule: Schedule, users: int, seed: int, clock: Clock
    ) -> None:
        self._core, self._trace, self._schedule, self._users = core, trace, schedule, users
        self._seed, self._clock = seed, clock
        vocab_size = core.resolved.model_config.vocab_size
        self._tokens = TokenSource(trace, vocab_size=vocab_size, seed=seed)
        self._under_way: dict[int, Record] = {}  # by the engine's number
        self._preemptions_before = core.stats.preemptions
        self._num_ended = 0
        self._start_s = clock.now_s()
        self.observed = Observed(started_s=self._start_s)

    def now_s(self) -> float:
        return self._clock.now_s() - self._start_s

    def step(self) -> bool:
        """Sends what is due and runs a step; False when all is done."""
        for due in self._schedule.take(self.now_s()):
            self._send(due)
        if self._core.has_work:
            self._run_step()
        elif (next_s := self._schedule.next_s()) is not None:
            threading.Event().wait(max(0.0, next_s - self.now_s()))
        else:
            return False
        if self._schedule.drained and self.observed.drained_s is None:
            self.observed.drained_s = self.now_s()
        return True

    def finish(self) -> Observed:
        for request_id in self._under_way:
            self._core.end(request_id)
        self.observed.preemptions = self._core.stats.preemptions - self._preemptions_before
        self.observed.end_s = self.now_s()
        return self.observed

    def _send(self, due: Due) -> None:
        row = self._trace.rows[due.index]
        # A request is sent when it is due: that the loop was in a step then is the engine's delay.
        record = Record(
            index=due.index, input_tokens=row.input_length, due_s=due.due_s, sent_s=due.due_s
        )
        self.observed.records.append(record)
        params = SamplingParams(temperature=0.0, max_tokens=row.output_length, ignore_eos=True)
        prompt = self._tokens.prompt(due.index).tolist()
        try:
            self._check_room(row)
            self._under_way[self._core.add(prompt, params, seed=self._seed)] = record
        except RequestError as refused:
            record.error = str(refused)
            self._end(record)

    def _check_room(self, row: TraceRow) -> None:
        """An engine would end an answer where its room ends, and seem to have given it sooner."""
        limit = self._core.resolved.max_model_len
        if row.input_length < limit < row.input_length + row.output_length:
            raise RequestError(
                f"{row.input_length:,} tokens of prompt and {row.output_length:,} of output are more "
                f"than --max-model-len {limit}."
            )

    def _run_step(self) -> None:
        before, start_s = self._core.stats, self.now_s()
        events = self._core.step()
        after, now_s = self._core.stats, self.now_s()
        self.observed.samples.append(
            Sample(
                start_s=start_s,
                lasts_s=now_s - start_s,
                running=len(events),
                kv_used=1 - self._core.free_tokens / self._core.plan.tokens_total,
                prefill_tokens=after.prefill_tokens - before.prefill_tokens,
                output_tokens=after.output_tokens - before.output_tokens,
                exchanged=after.exchange_steps > before.exchange_steps,
            )
        )
        self._take(events, now_s)

    def _take(self, events: Sequence[Event], now_s: float) -> None:
        for event in events:
            record = self._under_way[event.request_id]
            record.cached_tokens = event.num_cached_tokens
            if event.token_id is not None:
                record.add(now_s, 1)
            if event.finish_reason is not None:
                del self._under_way[event.request_id]
                self._end(record)

    def _end(self, record: Record) -> None:
        record.end_s = self.now_s()
        self._num_ended += 1
        if self._num_ended == self._users:
            self.observed.filled_s = record.end_s
        self._schedule.ended(record.index, record.end_s)
