"""The engine's process, spoken to over its socket."""

import os
import socket
import subprocess
import sys

from kvspan.engine.messages import Begin, CollectiveTime, End, encode
from kvspan.engine.service import collectives_of, parts_of
from kvspan.step import TimedSpan
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
