"""The life of a rank: receive, obey, answer. Knows neither what a worker computes nor who started it."""

import contextlib
import gc
import traceback
from collections.abc import Iterator
from typing import Protocol

from kvspan.errors import ConfigError, ModelError, RequestError
from kvspan.step import Fill, RankReport, Step, StepResult, TimedSpan
from kvspan.worker.messages import (
    AllocateCache,
    Allocated,
    Answer,
    Channel,
    Done,
    Execute,
    Failed,
    FillCache,
    Filled,
    Load,
    Report,
    Result,
    Shutdown,
    Watch,
    Watched,
    decode_order,
    encode,
)

TOLD_ERRORS = {error.__name__: error for error in (ConfigError, ModelError, RequestError)}
"""Errors that the driver raises again as what they were, by the name that `Failed.kind` carries."""


class RankWorker(Protocol):
    """One rank's model, cache and sampler."""

    def load(self) -> RankReport:
        """Loads the weights."""
        ...

    def allocate_cache(self, num_blocks: int) -> None:
        """Allocates the KV cache.

        Args:
            num_blocks: blocks of this rank's pool.
        """
        ...

    def execute(self, step: Step) -> StepResult:
        """Runs one step; only rank 0's result is used."""
        ...

    def fill(self, fill: Fill) -> None:
        """Makes up keys and values."""
        ...

    def watch(self, on: bool) -> list[TimedSpan]:
        """Notes where time goes from here on, or no longer; what it noted since the last call."""
        ...

    def close(self) -> None:
        """Lets go of whatever outlives the process."""
        ...


def serve(channel: Channel, worker: RankWorker, rank: int) -> None:
    """Obeys the driver until it says `Shutdown` or hangs up.

    Args:
        channel: to the driver.
        worker: who obeys.
        rank: of this process; rank 0 answers steps with their results.

    Raises:
        Exception: what the worker raised; `failures_told` is around the target and tells the driver.
    """
    while (body := channel.receive()) is not None:
        order = decode_order(body)
        if isinstance(order, Shutdown):
            break
        channel.send(encode(_obey(order, worker, rank)))
    worker.close()


@contextlib.contextmanager
def failures_told(channel: Channel, rank: int) -> Iterator[None]:
    """Turns an exception of its body into a `Failed` to the driver and an exit code of 1.

    Whoever starts a target in a process puts this around it.

    Raises:
        SystemExit: instead of the exception; this process has to end.
    """
    try:
        yield
    except Exception as error:
        with contextlib.suppress(OSError):  # with the driver gone nobody is left to tell
            channel.send(encode(_failure(error, rank)))
        raise SystemExit(1) from error


def _obey(
    order: Load | AllocateCache | FillCache | Watch | Execute, worker: RankWorker, rank: int
) -> Answer:
    match order:
        case Load():
            return Report(worker.load())
        case AllocateCache(num_blocks):
            worker.allocate_cache(num_blocks)
            gc.freeze()  # what is there will stay: to go through it takes longer than a step
            return Allocated()
        case FillCache(fill):
            worker.fill(fill)
            return Filled()
        case Watch(on):
            return Watched(tuple(worker.watch(on)))
        case Execute(step):
            result = worker.execute(step)
            return Result(result) if rank == 0 else Done(step.step_id)


def _failure(error: Exception, rank: int) -> Failed:
    kinds = (base.__name__ for base in type(error).__mro__ if base.__name__ in TOLD_ERRORS)
    kind = next(kinds, "")
    sentence = str(error) if kind else f"{type(error).__name__}: {error}"
    return Failed(rank, kind, sentence, "".join(traceback.format_exception(error)))
