"""Time as an argument. Nobody else in kvspan calls `time`."""

import time
from typing import Protocol


class Clock(Protocol):
    """A monotonic clock; only differences mean anything."""

    def now_s(self) -> float:
        """Seconds since an arbitrary start."""
        ...


class WallClock:
    """The machine's monotonic clock."""

    def now_s(self) -> float:
        """Seconds since an arbitrary start."""
        return time.monotonic()


class VirtualClock:
    """A clock that stands until somebody advances it: for tests and simulation."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now_s(self) -> float:
        """Seconds, as advanced so far."""
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Moves the clock forward.

        Args:
            seconds: how far; not negative.
        """
        if seconds < 0:
            raise ValueError(f"a clock does not run backwards: {seconds} s")
        self._now_s += seconds


def unix_s() -> float:
    """Seconds since 1970, for records that leave the process; no duration is measured with it."""
    return time.time()
