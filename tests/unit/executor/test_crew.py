"""Frames cut from a stream, however the stream was cut."""

import signal
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvspan.executor.crew import Inbox, ending_of, endings_of
from kvspan.worker.messages import LENGTH


@given(bodies=st.lists(st.binary(max_size=40)), cuts=st.lists(st.integers(0, 400)))
def test_an_inbox_gives_back_the_frames_whatever_the_pieces(
    bodies: list[bytes], cuts: list[int]
) -> None:
    stream = b"".join(LENGTH.pack(len(body)) + body for body in bodies)
    edges = sorted({0, len(stream), *(cut % (len(stream) + 1) for cut in cuts)})
    inbox = Inbox()
    pieces = [stream[a:b] for a, b in pairwise(edges)]
    assert [body for piece in pieces for body in inbox.feed(piece)] == bodies


def test_a_frame_comes_with_its_last_byte_and_not_before() -> None:
    inbox = Inbox()
    frame = LENGTH.pack(2) + b"ab"
    assert [inbox.feed(frame[i : i + 1]) for i in range(len(frame))] == [[]] * (len(frame) - 1) + [
        [b"ab"]
    ]


KILLED, HINT = "was killed by signal 9 (Killed)", "; if nobody did that, memory may have run out"


@pytest.mark.parametrize(
    ("codes", "says"),
    [
        ((-signal.SIGKILL,), f"rank 0 {KILLED}{HINT}."),
        ((-signal.SIGKILL,) * 2, f"rank 0 {KILLED}; rank 1 {KILLED}{HINT}."),
        ((1, None), "rank 0 ended with exit code 1; rank 1 went down with its fork-server."),
    ],
)
def test_what_may_have_killed_ranks_is_said_once(codes: tuple[int | None, ...], says: str) -> None:
    assert endings_of(list(enumerate(codes))) == says


def test_how_a_process_has_ended() -> None:
    assert ending_of(-signal.SIGKILL) == KILLED + HINT
    assert ending_of(3) == "ended with exit code 3"
