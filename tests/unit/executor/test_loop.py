"""A rank's loop over a socket pair: what it answers to what, and how it tells a failure."""

import contextlib
import math
import socket
import threading
from dataclasses import dataclass, field

import pytest

from kvspan.errors import ConfigError, LayoutError
from kvspan.step import RankReport, Row, Sampled, Step, StepResult, TokenLogprob
from kvspan.worker.loop import failures_told, serve
from kvspan.worker.messages import (
    AllocateCache,
    Allocated,
    Answer,
    Channel,
    Done,
    Execute,
    Failed,
    Load,
    Order,
    Report,
    Result,
    Shutdown,
    decode_answer,
    encode,
)

STEP = Step(4, (), (Row(1, 0, 1, True),), (9,))
RESULT = StepResult(4, (Sampled(1, 5, (TokenLogprob(5, -math.inf, 1),)),))


@dataclass
class Scripted:
    """Notes what it is asked for; `trouble` is raised by `load`."""

    trouble: Exception | None = None
    asked: list[object] = field(default_factory=list)

    def load(self) -> RankReport:
        if self.trouble is not None:
            raise self.trouble
        return RankReport(2, 10, 20, 30)

    def allocate_cache(self, num_blocks: int) -> None:
        self.asked.append(num_blocks)

    def execute(self, step: Step) -> StepResult:
        self.asked.append(step)
        return RESULT

    def close(self) -> None:
        self.asked.append("close")


def dialogue(worker: Scripted, rank: int, *orders: Order) -> list[Answer]:
    """All answers of a rank that is given `orders`, and then none."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        driver = Channel(ours)
        for order in orders:
            driver.send(encode(order))
        ours.shutdown(socket.SHUT_WR)
        with contextlib.suppress(SystemExit), failures_told(Channel(theirs), rank):
            serve(Channel(theirs), worker, rank)
        theirs.shutdown(socket.SHUT_WR)
        return [decode_answer(body) for body in iter(driver.receive, None)]


@pytest.mark.parametrize(("rank", "answer"), [(0, Result(RESULT)), (1, Done(4))])
def test_every_order_has_its_answer_and_rank_0_alone_sends_results(rank: int, answer: Answer) -> None:
    worker = Scripted()
    answers = dialogue(worker, rank, Load(), AllocateCache(7), Execute(STEP), Shutdown(), Load())
    assert answers == [Report(RankReport(2, 10, 20, 30)), Allocated(), answer]
    assert worker.asked == [7, STEP, "close"]


def test_a_driver_that_hangs_up_is_as_good_as_shutdown() -> None:
    worker = Scripted()
    assert dialogue(worker, 0) == []
    assert worker.asked == ["close"]


@pytest.mark.parametrize(
    ("trouble", "kind", "sentence"),
    [
        (ConfigError("No."), "ConfigError", "No."),
        (LayoutError("No.", reason="test"), "ConfigError", "No."),
        (KeyError("x"), "", "KeyError: 'x'"),
    ],
)
def test_a_failure_is_told_with_its_kind(trouble: Exception, kind: str, sentence: str) -> None:
    worker = Scripted(trouble)
    (failed,) = dialogue(worker, 3, Load(), AllocateCache(1))
    assert isinstance(failed, Failed)
    assert (failed.rank, failed.kind, failed.sentence) == (3, kind, sentence)
    assert "in load" in failed.traceback
    assert worker.asked == []


def test_a_failure_that_nobody_hears_ends_the_rank_all_the_same() -> None:
    ours, theirs = socket.socketpair()
    ours.close()
    with theirs, pytest.raises(SystemExit, match="1"), failures_told(Channel(theirs), 0):
        raise KeyError("x")


def test_a_channel_carries_frames_of_any_size() -> None:
    ours, theirs = socket.socketpair()
    bodies = [b"", b"x", bytes(3_000_000)]
    with ours, theirs:
        sender = threading.Thread(target=lambda: [Channel(ours).send(body) for body in bodies])
        sender.start()
        heard = [Channel(theirs).receive() for _ in bodies]
        sender.join()
    assert heard == bodies
