"""Frames cut from a stream, however the stream was cut."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from kvspan.executor.crew import Inbox
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
