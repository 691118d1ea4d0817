"""Signs of life, heard over a pipe on a clock that stands."""

import os
from collections.abc import Iterator

import pytest

from kvspan.clock import VirtualClock
from kvspan.engine.heartbeat import Heart, Listener

PATIENCE_S = 30.0


@pytest.fixture
def pipe() -> Iterator[tuple[Listener, int, VirtualClock]]:
    clock = VirtualClock()
    reading, writing = os.pipe()
    listener = Listener(reading, patience_s=PATIENCE_S, clock=clock)
    yield listener, writing, clock
    listener.close()
    os.close(writing)


def test_silence_counts_from_the_last_beat(pipe: tuple[Listener, int, VirtualClock]) -> None:
    listener, heart, clock = pipe
    os.write(heart, b".")
    assert not listener.is_silent()
    clock.advance(PATIENCE_S)
    assert not listener.is_silent()
    clock.advance(0.1)
    assert listener.is_silent()


def test_before_the_first_beat_there_is_more_patience(pipe: tuple[Listener, int, VirtualClock]) -> None:
    listener, _, clock = pipe
    clock.advance(4 * PATIENCE_S)
    assert not listener.is_silent()
    clock.advance(10 * PATIENCE_S)
    assert listener.is_silent()


def test_a_listener_that_slept_blames_nobody(pipe: tuple[Listener, int, VirtualClock]) -> None:
    listener, heart, clock = pipe
    os.write(heart, b".")
    assert not listener.is_silent()
    os.write(heart, b"." * 500)
    clock.advance(1000 * PATIENCE_S)
    assert not listener.is_silent()


@pytest.mark.timeout(30)
def test_a_heart_beats_until_its_loop_is_overdue() -> None:
    clock = VirtualClock()
    reading, writing = os.pipe()
    heart = Heart(writing, clock)
    heart.start()
    assert os.read(reading, 1) == b"."
    heart.expect(5.0)
    os.read(reading, 1)
    clock.advance(6.0)
    os.set_blocking(reading, False)
    beats = 0
    while True:  # one beat may have been under way
        try:
            beats += len(os.read(reading, 100))
        except BlockingIOError:
            break
    assert beats <= 2
    os.set_blocking(reading, True)
    heart.expect(5.0)
    assert os.read(reading, 1) == b"."
    heart.stop()
    os.close(reading)
