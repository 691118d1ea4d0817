"""Signs of life of an engine's process: a heart beats there, and a listener hears it here.

A beat says that the process runs and that its loop is not overdue. A thread of its own beats, so a long
step is no silence; a stopped process, and one whose loop does not come round, fall silent.

Knows a pipe and a clock. Knows no engine, and kills nobody.
"""

import contextlib
import math
import os
import threading

from kvspan.clock import Clock

BEAT_S = 0.5
"""Between two beats."""

_BEGIN_S = 300.0  # until the first one: an interpreter that loads torch from a cold disk takes its time
_READ_BYTES = 1 << 16


class Heart:
    """Beats from a thread of its own, for as long as this process runs and its loop is in time.

    Args:
        fd: the end to write of the pipe.
        clock: to tell what is overdue.
    """

    def __init__(self, fd: int, clock: Clock) -> None:
        os.set_blocking(fd, False)
        self._fd, self._clock = fd, clock
        self._due_s = math.inf
        self._stopped = threading.Event()

    def start(self) -> None:
        """Begins to beat; nothing is due yet."""
        threading.Thread(target=self._beat, name="heart", daemon=True).start()

    def expect(self, within_s: float) -> None:
        """Stops beating unless it is called again within so many seconds."""
        self._due_s = self._clock.now_s() + within_s

    def stop(self) -> None:
        """Beats no more."""
        self._stopped.set()

    def _beat(self) -> None:
        while True:
            if self._clock.now_s() < self._due_s:
                # A full pipe says that nobody listens for the moment, a broken one that nobody will.
                with contextlib.suppress(OSError):
                    os.write(self._fd, b".")
            if self._stopped.wait(BEAT_S):
                return


class Listener:
    """Hears a heart.

    Args:
        fd: the end to read of the pipe; closed with the listener.
        patience_s: silence that is no death yet.
        clock: to measure it.
    """

    def __init__(self, fd: int, *, patience_s: float, clock: Clock) -> None:
        os.set_blocking(fd, False)
        self._fd, self._clock = fd, clock
        self.patience_s = patience_s
        self._silent_from_s = clock.now_s() + _BEGIN_S

    def is_silent(self) -> bool:
        """Whether nothing was heard for longer than patience allows.

        What lies in the pipe counts as heard now: a listener that was stopped itself blames nobody.
        """
        now_s = self._clock.now_s()
        with contextlib.suppress(BlockingIOError):
            if os.read(self._fd, _READ_BYTES):
                self._silent_from_s = now_s + self.patience_s
        return now_s > self._silent_from_s

    def close(self) -> None:
        """Hears no more."""
        os.close(self._fd)
