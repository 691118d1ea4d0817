"""The engine's process, spoken to over its socket."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kvspan.clock import VirtualClock
from kvspan.config.engine import EngineConfig
from kvspan.engine import service
from kvspan.engine.build import resolve_engine
from kvspan.engine.core import EngineCore
from kvspan.engine.heartbeat import Heart
from kvspan.engine.messages import (
    Add,
    Begin,
    Begun,
    CollectiveTime,
    End,
    Order,
    Report,
    decode_report,
    encode,
)
from kvspan.engine.service import Link, Service, collectives_of, parts_of
from kvspan.errors import KvspanError, LateError
from kvspan.executor.crew import Inbox
from kvspan.request import SamplingParams
from kvspan.step import Fill, RankReport, Sampled, Step, StepResult, TimedSpan, pack_tokens
from kvspan.structured import StructuredOutputsParams
from kvspan.testing.tiny import TINY
from kvspan.worker.messages import LENGTH


def test_told_to_end_before_it_has_begun_it_ends_in_silence() -> None:
    ours, theirs = socket.socketpair()
    lifeline, lifeline_end = os.pipe()
    heart_end, heart = os.pipe()
    orders = (encode(Begin({"model": "nowhere"}, 0, False)), encode(End()))
    ours.sendall(b"".join(LENGTH.pack(len(body)) + body for body in orders))
    descriptors = (theirs.fileno(), lifeline, heart)
    try:
        ended = subprocess.run(
            [sys.executable, "-m", "kvspan.engine.service", *map(str, descriptors)],
            pass_fds=descriptors,
            capture_output=True,
            timeout=60,
            check=False,
        )
    finally:
        for end in (ours, theirs):
            end.close()
        for descriptor in (lifeline, lifeline_end, heart_end, heart):
            os.close(descriptor)
    assert (ended.returncode, ended.stderr) == (0, b"")


def span(group: str, op: str, own_s: float, sent_bytes: int = 0) -> TimedSpan:
    return TimedSpan("exchange", 0.0, own_s, own_s, group, op, sent_bytes)


def test_collectives_are_told_by_rank_and_kind_where_anything_moved() -> None:
    linear = TimedSpan("linear", 0.0, 1.0, 1.0)
    rank_0 = [span("tp", "all_reduce", 0.25), span("tp", "all_reduce", 0.5, 100), linear]
    rank_1 = [span("tp", "all_reduce", 1.0, 100), span("", "", 2.0), span("dcp", "all_gather", 0.5, 7)]
    assert collectives_of([rank_0, rank_1]) == (
        CollectiveTime(0, "tp", "all_reduce", 0.75, 100),
        CollectiveTime(1, "tp", "all_reduce", 1.0, 100),
        CollectiveTime(1, "dcp", "all_gather", 0.5, 7),
    )
    assert parts_of([rank_0, rank_1]) == {"exchange": (0.75 + 3.5) / 2, "linear": 0.5}


class Slow:
    """Ranks that take 0.25 s for each of some steps, and are late for the next."""

    world_size = 1

    def __init__(self, clock: VirtualClock, num_in_time: int) -> None:
        self._clock, self._left = clock, num_in_time
        self._step = Step(0, (), (), ())

    def start(self) -> Sequence[RankReport]:
        return [RankReport(rank=0, weight_bytes=1, free_bytes=1 << 30, kv_bytes_per_token=1)]

    def allocate_cache(self, num_blocks: int) -> None: ...

    def submit(self, step: Step) -> None:
        self._step = step

    def collect(self) -> StepResult:
        self._clock.advance(0.25)
        self._left -= 1
        if self._left < 0:
            raise LateError("Step 9: rank 0 has not answered.")
        rows = tuple(Sampled(row.request_id, 5) for row in self._step.rows)
        return StepResult(self._step.step_id, rows)

    def probe(self) -> None: ...

    def fill(self, fill: Fill) -> None: ...

    def watch(self, on: bool) -> list[list[TimedSpan]]:
        return [[]]

    def shutdown(self) -> None: ...


@pytest.mark.parametrize(
    ("num_in_time", "seen"), [(0, "none was in time"), (2, "the longest that was in time took 0.25 s")]
)
def test_who_is_late_again_and_again_is_told_of_the_flag(
    num_in_time: int, seen: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = VirtualClock()
    started: list[Slow] = []

    def start(*_: object, **__: object) -> Slow:
        started.append(Slow(clock, num_in_time))
        return started[-1]

    monkeypatch.setattr(service, "make_executor", start)
    given_up, _ = served(tmp_path, start(), clock, [asked(0)], max_restarts=2)
    assert len(started) == 1 + 2
    assert "there were 2 restart(s) in ten minutes (--max-restarts)." in str(given_up)
    assert f"more than --step-timeout 0.5 ({seen}): raise it." in str(given_up)


def test_with_whom_a_step_begins_is_told_before_it_runs(tmp_path: Path) -> None:
    """The third of three that run two at a time waits, and is in no step."""
    clock = VirtualClock()
    _, told = served(tmp_path, Slow(clock, 0), clock, [asked(i) for i in range(3)], max_num_seqs=2)
    assert told == [Begun((0, 1))]


def test_whose_form_is_made_is_told_before_it_is(tmp_path: Path) -> None:
    """Here there is no tokenizer to make one with, and that is the end."""
    clock = VirtualClock()
    form = StructuredOutputsParams(regex="a")
    _, told = served(tmp_path, Slow(clock, 0), clock, [asked(0), asked(1, structured_outputs=form)])
    assert told == [Begun((1,))]


def asked(request_id: int, **more: Any) -> Add:
    params = SamplingParams(max_tokens=30, ignore_eos=True, **more)
    return Add(request_id, pack_tokens([3, 4]), 2, params, 0, "", 0)


def served(
    model: Path,
    executor: Slow,
    clock: VirtualClock,
    orders: Sequence[Order],
    *,
    max_restarts: int = 0,
    **more: object,
) -> tuple[KvspanError, list[Report]]:
    """How an engine that was given some orders at once gave up, and what it told until then."""
    (model / "config.json").write_text(json.dumps(TINY["llama-gqa"]))
    options = {"model": str(model), "load_format": "dummy", "step_timeout": 0.5, "max_model_len": 64}
    asked = EngineConfig.from_mapping({**options, "kv_cache_memory": "1MiB", **more})
    ours, theirs = socket.socketpair()
    pipe = os.pipe()
    ours.sendall(b"".join(_frame(encode(order)) for order in orders))
    serving = Service(
        EngineCore(resolve_engine(asked)[0], executor),
        executor,
        Link(theirs),
        Begin(options, max_restarts, False),
        heart=Heart(pipe[1], clock),
        clock=clock,
    )
    with pytest.raises(KvspanError) as given_up:
        serving.run()
    theirs.close()
    reports = map(decode_report, Inbox().feed(b"".join(iter(lambda: ours.recv(1 << 16), b""))))
    ours.close()
    for end in pipe:
        os.close(end)
    return given_up.value, list(reports)


def _frame(body: bytes) -> bytes:
    return LENGTH.pack(len(body)) + body
