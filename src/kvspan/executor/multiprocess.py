"""Ranks as processes of this machine: the `Executor` that `--distributed-executor-backend mp` means.

A rank that dies, fails or does not answer ends the whole executor, within a deadline and with a
sentence, and no process stays behind. Knows orders and answers. Knows no tensors, and not what a step
contains.
"""

import contextlib
import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

from kvspan.clock import Clock, WallClock
from kvspan.errors import EngineDeadError, LateError
from kvspan.executor.children import Child, fork_server
from kvspan.executor.crew import Crew, Deadline, RankLost
from kvspan.step import Fill, RankReport, Step, StepResult, TimedSpan
from kvspan.worker.loop import TOLD_ERRORS
from kvspan.worker.messages import (
    AllocateCache,
    Answer,
    Execute,
    Failed,
    FillCache,
    Load,
    Report,
    Result,
    Shutdown,
    Watch,
    Watched,
    encode,
)

_GRACE_S = 5.0  # between the polite request to end and the kill
_TRACEBACK_LINES = 15


@dataclass(frozen=True, slots=True)
class _UnderWay:
    """A step that has been submitted and not collected."""

    doing: str
    deadline: Deadline


class MultiprocessExecutor:
    """A process for each rank, forked from a zygote; fulfils `kvspan.step.Executor`.

    Args:
        world_size: ranks.
        payload: given to every rank's target, which alone understands it.
        target: "module:function", called with the `Channel`, the payload and the rank; it ends up in
            `kvspan.worker.loop.serve`.
        step_timeout_s: from `submit` until every rank must have answered.
        start_timeout_s: the same for loading, and for allocating the cache.
        threads_per_rank: threads that torch may use in each rank.
        clock: for the two timeouts.
    """

    def __init__(
        self,
        *,
        world_size: int,
        payload: bytes,
        target: str = "kvspan.worker.main:run",
        step_timeout_s: float,
        start_timeout_s: float,
        threads_per_rank: int = 1,
        clock: Clock | None = None,
    ) -> None:
        self._world_size = world_size
        self._payload = payload
        self._target = target
        self._step_timeout_s = step_timeout_s
        self._start_timeout_s = start_timeout_s
        self._threads_per_rank = threads_per_rank
        self._clock = clock or WallClock()
        self._crew: Crew | None = None
        self._under_way: _UnderWay | None = None
        self._why_dead = "The engine has not been started."

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self._world_size

    def start(self) -> Sequence[RankReport]:
        """Forks the ranks and makes them load the weights.

        Returns:
            One report a rank, in order of rank.

        Raises:
            KvspanError: what a rank refused to load, as the class it was (`ModelError`, `ConfigError`).
            EngineDeadError: a rank died, hung or failed otherwise. All have been ended.
        """
        assert self._crew is None, "the ranks run already"
        children: list[Child] = []
        weakref.finalize(self, _abandon, children, os.getpid())
        server = fork_server()
        for rank in range(self._world_size):
            children.append(server.fork(self._target, rank=rank, num_threads=self._threads_per_rank))
        self._crew = Crew(children, self._clock)
        try:
            answers = self._ask("Loading", self._payload, encode(Load()))
        except BaseException:  # Ctrl-C as well: whoever made us has nothing to shut down yet
            self.shutdown()
            raise
        return [answer.report for answer in answers if isinstance(answer, Report)]

    def allocate_cache(self, num_blocks: int) -> None:
        """Makes every rank allocate its KV cache.

        Args:
            num_blocks: blocks of each rank's pool.

        Raises:
            KvspanError: as `start` does.
        """
        self._ask("Allocating the cache", encode(AllocateCache(num_blocks)))

    def fill(self, fill: Fill) -> None:
        """See `step.MeasuredExecutor.fill`; it may take as long as loading."""
        self._ask("Filling the cache", encode(FillCache(fill)))

    def watch(self, on: bool) -> list[list[TimedSpan]]:
        """See `step.MeasuredExecutor.watch`."""
        deadline = self._deadline(self._step_timeout_s, f"--step-timeout {self._step_timeout_s:g}")
        answers = self._ask("Watching", encode(Watch(on)), deadline=deadline)
        return [list(answer.spans) for answer in answers if isinstance(answer, Watched)]

    def submit(self, step: Step) -> None:
        """Sends a step to every rank, encoded once.

        Raises:
            EngineDeadError: a rank died or hung; all have been ended.
        """
        crew = self._living_crew()
        assert self._under_way is None, "one step is under way at most"
        deadline = self._deadline(self._step_timeout_s, f"--step-timeout {self._step_timeout_s:g}")
        self._under_way = _UnderWay(f"Step {step.step_id}", deadline)
        try:
            crew.send(encode(Execute(step)), deadline)
        except RankLost as loss:
            raise self._end(self._under_way.doing, loss) from None

    def collect(self) -> StepResult:
        """Waits for the step under way, at most until `step_timeout_s` after it was submitted.

        Raises:
            EngineDeadError: a rank died, hung or failed. All ranks have been ended.
        """
        crew = self._living_crew()
        assert self._under_way is not None, "`collect` without `submit`"
        try:
            answers = crew.answers(self._under_way.deadline)
        except RankLost as loss:
            raise self._end(self._under_way.doing, loss) from None
        self._under_way = None
        (result,) = (answer.result for answer in answers if isinstance(answer, Result))
        return result

    def probe(self) -> None:
        """See `step.MeasuredExecutor.probe`."""
        crew = self._living_crew()
        try:
            crew.look()
        except RankLost as loss:
            raise self._end("Between two steps", loss) from None

    def shutdown(self) -> None:
        """Ends all ranks, politely for some seconds and then by force; a second call does nothing."""
        if self._crew is None:
            return
        crew, self._crew, self._under_way = self._crew, None, None
        self._why_dead = "The engine has been shut down."
        try:
            with contextlib.suppress(RankLost):
                crew.send(encode(Shutdown()), self._deadline(_GRACE_S, "to end"))
                crew.await_end(_GRACE_S)
        finally:
            crew.kill()

    def _ask(self, doing: str, *bodies: bytes, deadline: Deadline | None = None) -> list[Answer]:
        """Sends every rank the same frames and hears one answer from each, between two steps."""
        crew = self._living_crew()
        deadline = deadline or self._deadline(self._start_timeout_s, "the start timeout")
        try:
            for body in bodies:
                crew.send(body, deadline)
            return crew.answers(deadline)
        except RankLost as loss:
            dead = self._end(doing, loss)
            if loss.failed is not None and loss.failed.kind:
                raise TOLD_ERRORS[loss.failed.kind](loss.failed.sentence) from None
            raise dead from None

    def _living_crew(self) -> Crew:
        if self._crew is None:
            raise EngineDeadError(self._why_dead)
        return self._crew

    def _deadline(self, within_s: float, name: str) -> Deadline:
        return Deadline(self._clock.now_s() + within_s, f"{within_s:g} s ({name})")

    def _end(self, doing: str, loss: RankLost) -> EngineDeadError:
        """Kills all ranks; what the user is to be told."""
        crew, self._crew, self._under_way = self._living_crew(), None, None
        crew.kill()
        ended = "its rank has" if self._world_size == 1 else f"all {self._world_size} ranks have"
        self._why_dead = f"{doing}: {loss.sentence} The engine has stopped; {ended} been ended."
        kind = LateError if loss.is_late else EngineDeadError
        return kind(self._why_dead + _traceback_tail(loss.failed))


def _abandon(children: Sequence[Child], driver_pid: int) -> None:
    """Ends what an executor that nobody has shut down leaves behind."""
    mine = children if os.getpid() == driver_pid else ()  # a fork of the driver ends, not the driver
    for child in mine:
        child.kill()
        child.close()


def _traceback_tail(failed: Failed | None) -> str:
    """The last lines of a rank's traceback, below the sentence; nothing for a rank that left none."""
    if failed is None:
        return ""
    lines = failed.traceback.splitlines()[-_TRACEBACK_LINES:]
    return "".join(f"\n  rank {failed.rank} | {line}" for line in lines)
