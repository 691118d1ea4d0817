"""How the processes of a host come to share one nameless file: rank 0 makes it and hands it round.

Nothing in a file system stands for the file, so it is gone when the last process is, however that ended.
The one name there is, of the socket at which the ranks meet, is removed when all have come.
"""

import contextlib
import os
import socket
import struct
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

_RANK = struct.Struct("<q")
_LOOK_AGAIN_S = 0.002


def share_file(*, rank: int, size: int, path: Path, timeout_s: float) -> int:
    """Meets the other ranks.

    Args:
        rank: of this process.
        size: ranks in all.
        path: of the socket; it does not exist yet, and is the same for all ranks and nobody else's.
        timeout_s: until which all must have come.

    Returns:
        A descriptor of the same empty file on every rank, for the caller to close.

    Raises:
        TimeoutError: not all ranks have come in time.
    """
    deadline_s = time.monotonic() + timeout_s
    return _hand_round(size, path, deadline_s) if rank == 0 else _receive(rank, path, deadline_s)


def _hand_round(size: int, path: Path, deadline_s: float) -> int:
    file = _nameless_file()
    absent = set(range(1, size))
    with _address(path) as address, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        try:
            listener.listen(size)
            while absent:
                listener.settimeout(max(deadline_s - time.monotonic(), _LOOK_AGAIN_S))
                with listener.accept()[0] as peer:
                    absent.discard(_RANK.unpack(peer.recv(_RANK.size, socket.MSG_WAITALL))[0])
                    socket.send_fds(peer, [b"\0"], [file])
        except TimeoutError:
            os.close(file)
            raise TimeoutError(f"ranks {sorted(absent)} have not come to the start in time") from None
        finally:
            path.unlink()
    return file


def _receive(rank: int, path: Path, deadline_s: float) -> int:
    with _address(path) as address:
        while time.monotonic() < deadline_s:
            with socket.socket(socket.AF_UNIX) as peer:
                peer.settimeout(max(deadline_s - time.monotonic(), _LOOK_AGAIN_S))
                try:
                    peer.connect(address)
                except (FileNotFoundError, ConnectionRefusedError):  # rank 0 is not there yet
                    time.sleep(_LOOK_AGAIN_S)
                    continue
                peer.sendall(_RANK.pack(rank))
                _, files, _, _ = socket.recv_fds(peer, 1, 1)
                if files:
                    return files[0]
                raise ConnectionError("rank 0 has ended during the start")
    raise TimeoutError("rank 0 has not come to the start in time")


@contextlib.contextmanager
def _address(path: Path) -> Iterator[str]:
    """The path, as short as a socket's address has to be: some 100 bytes at the most."""
    if sys.platform != "linux":
        yield str(path)
        return
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{directory}/{path.name}"
    finally:
        os.close(directory)


def _nameless_file() -> int:
    if sys.platform == "linux":
        return os.memfd_create("kvspan")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
