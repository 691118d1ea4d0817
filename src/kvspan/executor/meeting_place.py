"""A directory in which the ranks of a driver meet, and what is left of those of drivers that have gone.

Drivers and fork-servers remove it when they end. If both are killed at once nobody does, so whoever
makes one looks for those that nobody holds any more: a lock tells, and it goes with its holder, however
that ended. Knows files. Knows no processes.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

_PREFIX = "kvspan-ranks-"
_MAKING = f".{_PREFIX}"  # not seen by those who look until it is held
_MEETINGS = "meet-*"


class MeetingPlace:
    """A directory of this process alone. It is removed by `close`, or by the next that is made."""

    def __init__(self) -> None:
        for left in _left_behind(Path(tempfile.gettempdir())):
            with contextlib.suppress(OSError):  # another one was quicker, or it is none of ours
                _remove(left)
        made = Path(tempfile.mkdtemp(prefix=_MAKING))
        self._lock = os.open(made, os.O_RDONLY)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self.path = made.rename(made.with_name(_PREFIX + made.name.removeprefix(_MAKING)))

    def meeting(self, number: int) -> Path:
        """A path in it."""
        return self.path / _MEETINGS.replace("*", str(number))

    def let_go(self) -> None:
        """In a fork of this process, which is not the one that holds it."""
        os.close(self._lock)

    def close(self) -> None:
        """Removes it."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _left_behind(directory: Path) -> Iterator[Path]:
    """Those of this user that nobody holds."""
    for path in directory.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError), _opened(path) as descriptor:
            if os.fstat(descriptor).st_uid == os.geteuid():
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                yield path


def _remove(directory: Path) -> None:
    """Removes what meetings left; a directory with anything else in it is not ours."""
    for path in directory.glob(_MEETINGS):
        path.unlink()
    directory.rmdir()


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
