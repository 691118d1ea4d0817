"""Ctrl-C at a safe moment. Knows signals and nothing of engines."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def held_back() -> Iterator[None]:
    """Holds the first Ctrl-C back until the block is done; a second one breaks in.

    A step is told to several ranks one after the other: broken off in between, some would do it and
    some not, and every later answer would be wrong. Python delivers signals to the main thread, so
    elsewhere there is nothing to hold back.

    Raises:
        KeyboardInterrupt: after the block, if Ctrl-C came in it; or within it, at the second one.
    """
    usual = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(usual):
        yield
        return
    came: list[tuple[int, FrameType | None]] = []

    def hold(number: int, frame: FrameType | None) -> None:
        came.append((number, frame))
        if len(came) > 1:
            usual(number, frame)

    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)
    if came:
        usual(*came[0])
