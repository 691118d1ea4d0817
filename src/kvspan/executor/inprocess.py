"""Ranks as threads of this process: one rank in production, any number in tests.

A rank has a thread of its own, so that `submit` returns at once here as it does with processes.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from threading import BrokenBarrierError
from typing import TypeVar

import torch

from kvspan.comm.group import World
from kvspan.comm.local import local_worlds
from kvspan.errors import EngineDeadError
from kvspan.step import Fill, RankReport, Step, StepResult, TimedSpan
from kvspan.worker.loop import RankWorker

T = TypeVar("T")


class InProcessExecutor:
    """Fulfils `step.Executor` with threads.

    Args:
        world_size: ranks.
        make_worker: builds a rank's worker from its world, on the rank's own thread.
        num_threads: threads that torch may use in each rank.
    """

    def __init__(
        self, *, world_size: int, make_worker: Callable[[World], RankWorker], num_threads: int = 1
    ) -> None:
        self.world_size = world_size
        self._make_worker = make_worker
        self._num_threads = num_threads
        self._worlds = local_worlds(world_size)
        self._threads = [
            ThreadPoolExecutor(1, thread_name_prefix=f"kvspan-rank-{rank}") for rank in range(world_size)
        ]
        self._workers: list[RankWorker] = []
        self._step: list[Future[StepResult]] = []
        self._dead: str | None = None

    def start(self) -> Sequence[RankReport]:
        """Builds the workers and loads the weights; one report a rank."""
        self._workers = self._settle(
            [thread.submit(self._make, world) for thread, world in self._pairs()]
        )
        return self._settle(
            [t.submit(w.load) for t, w in zip(self._threads, self._workers, strict=True)]
        )

    def allocate_cache(self, num_blocks: int) -> None:
        """Makes every rank allocate `num_blocks` blocks."""
        pairs = zip(self._threads, self._workers, strict=True)
        self._settle([t.submit(w.allocate_cache, num_blocks) for t, w in pairs])

    def fill(self, fill: Fill) -> None:
        """Makes every rank write keys and values that it makes up."""
        pairs = zip(self._threads, self._workers, strict=True)
        self._settle([t.submit(w.fill, fill) for t, w in pairs])

    def watch(self, on: bool) -> list[list[TimedSpan]]:
        """See `step.MeasuredExecutor.watch`."""
        pairs = zip(self._threads, self._workers, strict=True)
        return self._settle([t.submit(w.watch, on) for t, w in pairs])

    def submit(self, step: Step) -> None:
        """Gives the step to every rank."""
        self._refuse_if_dead()
        pairs = zip(self._threads, self._workers, strict=True)
        self._step = [t.submit(w.execute, step) for t, w in pairs]

    def collect(self) -> StepResult:
        """Waits for the step under way; rank 0's result.

        Raises:
            EngineDeadError: a rank failed.
        """
        self._refuse_if_dead()
        try:
            return self._settle(self._step)[0]
        except Exception as failure:
            self.shutdown()
            self._dead = f"A rank failed: {failure}"
            raise EngineDeadError(self._dead) from failure

    def probe(self) -> None:
        """Threads of this process are there as long as it is."""
        self._refuse_if_dead()

    def shutdown(self) -> None:
        """Ends the threads."""
        self._dead = "The engine has been shut down."
        self._worlds[0].abort()
        for thread, worker in zip(self._threads, self._workers, strict=False):
            thread.submit(worker.close)
        for thread in self._threads:
            thread.shutdown(wait=False)
        self._workers = []

    def _pairs(self) -> list[tuple[ThreadPoolExecutor, World]]:
        return list(zip(self._threads, self._worlds, strict=True))

    def _make(self, world: World) -> RankWorker:
        torch.set_num_threads(self._num_threads)  # holds for the calling thread
        return self._make_worker(world)

    def _settle(self, futures: Sequence[Future[T]]) -> list[T]:
        """Every rank's result, or the first failure that another rank's did not merely cause."""
        for future in futures:
            future.add_done_callback(self._abort_if_failed)
        failures = [f.exception() for f in futures if f.exception() is not None]
        for failure in sorted(failures, key=lambda e: isinstance(e, BrokenBarrierError)):
            assert failure is not None
            raise failure
        return [future.result() for future in futures]

    def _abort_if_failed(self, future: Future[T]) -> None:
        if not future.cancelled() and future.exception() is not None:
            self._worlds[0].abort()

    def _refuse_if_dead(self) -> None:
        if self._dead is not None:
            raise EngineDeadError(self._dead)
