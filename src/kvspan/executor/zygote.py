"""The fork-server: a small process that has torch loaded and forks ranks from it.

`multiprocessing`'s own fork-server and spawn import the user's `__main__` again in each child, so that
a script without `if __name__ == "__main__"` starts itself over and a REPL has nothing to import. This
one knows nothing of the user's program: a rank is a function named "module:function".

The driver holds one end of each of these; a closed end is how everybody learns that it has gone:

    control    driver -> zygote   orders to fork, each with two descriptors. Closed: the zygote ends
    leash      driver <-> zygote  one a rank. The zygote tells the rank's pid and later its exit code;
                                  the driver shuts its side to have the rank killed
    lifeline   driver -> ranks    nothing is ever written. Closed: a rank ends, zygote or not
    channel    driver <-> rank    orders and answers (`worker.messages`)

The zygote never runs a second thread, since a thread that holds a lock does not survive a fork. Knows
no models and no steps.
"""

import contextlib
import ctypes
import faulthandler
import gc
import importlib
import os
import selectors
import shutil
import signal
import socket
import struct
import sys
import threading
import traceback
from collections.abc import Callable
from typing import NoReturn

import msgspec

from kvspan.worker.loop import failures_told
from kvspan.worker.messages import Channel

NUMBER = struct.Struct("<q")
"""What the zygote says on a leash: a pid, then an exit code (minus the signal for a killed rank)."""

FDS_AHEAD = b"\0"
"""The byte that carries the descriptors of the order in the frame behind it."""

# SIGTERM may come to all processes of a service, SIGHUP from the kernel when the driver dies while a
# rank is stopped. Either way the zygote ends when the driver does, having tidied up.
_ZYGOTE_IGNORES = (signal.SIGTERM, signal.SIGHUP)
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class ForkOrder(msgspec.Struct, frozen=True, array_like=True):
    """A rank to fork; its channel and its leash travel with the order.

    Args:
        target: "module:function", called with the channel, the payload and the rank.
        rank: of the new process.
        num_threads: threads that torch may use in it.
    """

    target: str
    rank: int
    num_threads: int


def main() -> None:
    """Serves the driver that started this process, until it goes."""
    control_fd, lifeline_fd = map(int, sys.argv[1:3])
    private_dir = sys.argv[3]
    for ignored in (signal.SIGINT, *_ZYGOTE_IGNORES):
        signal.signal(ignored, signal.SIG_IGN)
    for name in _THREAD_VARIABLES:
        os.putenv(name, "1")  # OpenBLAS starts its threads as soon as it is loaded
    importlib.import_module("torch")
    _Zygote(socket.socket(fileno=control_fd), lifeline_fd).serve()
    shutil.rmtree(private_dir, ignore_errors=True)


class _Zygote:
    """Forks, reaps and kills ranks.

    Args:
        control: orders come in here.
        lifeline_fd: handed on to the ranks.
    """

    def __init__(self, control: socket.socket, lifeline_fd: int) -> None:
        self._control = control
        self._lifeline_fd = lifeline_fd
        self._leashes: dict[int, socket.socket] = {}  # by pid
        self._selector = selectors.DefaultSelector()
        self._woken, self._waker = socket.socketpair()
        self._serving = True

    def serve(self) -> None:
        """Works until the driver goes, and then kills all ranks."""
        self._waker.setblocking(False)
        signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda _signal, _frame: None)  # without a handler no wake-up
        self._watch(self._control, self._on_order)
        self._watch(self._woken, self._on_child_ended)
        while self._serving:
            for key, _ in self._selector.select():
                key.data()
        for pid in self._leashes:
            os.kill(pid, signal.SIGKILL)

    def _watch(self, sock: socket.socket, on_readable: Callable[[], None]) -> None:
        self._selector.register(sock, selectors.EVENT_READ, on_readable)

    def _on_order(self) -> None:
        _, fds, _, _ = socket.recv_fds(self._control, len(FDS_AHEAD), 2)
        body = Channel(self._control).receive()
        if body is None:
            self._serving = False
            return
        order = msgspec.msgpack.decode(body, type=ForkOrder)
        channel, leash = (socket.socket(fileno=fd) for fd in fds)
        _preload(order.target)
        pid = os.fork()
        if pid == 0:
            self._let_go_of_everything(leash)
            _be_rank(order, channel, self._lifeline_fd)
        channel.close()
        self._leashes[pid] = leash
        self._watch(leash, lambda: self._on_leash_shut(pid))
        _tell(leash, pid)

    def _on_leash_shut(self, pid: int) -> None:
        if pid in self._leashes:  # not reaped yet, so the pid is nobody else's
            self._selector.unregister(self._leashes[pid])
            os.kill(pid, signal.SIGKILL)

    def _on_child_ended(self) -> None:
        self._woken.recv(4096)
        while self._leashes:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            leash = self._leashes.pop(pid)
            with contextlib.suppress(KeyError):  # a rank whose leash was shut is not watched any more
                self._selector.unregister(leash)
            _tell(leash, os.waitstatus_to_exitcode(status))
            leash.close()

    def _let_go_of_everything(self, leash: socket.socket) -> None:
        """In a new rank: undoes what a zygote has and a rank must not have."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for ignored in _ZYGOTE_IGNORES:  # and not SIGINT, which is the driver's business
            signal.signal(ignored, signal.SIG_DFL)
        self._selector.close()
        for sock in (self._control, self._woken, self._waker, leash, *self._leashes.values()):
            sock.close()


def _preload(target: str) -> None:
    """Imports the target's module before the fork, so that all ranks share its pages."""
    with contextlib.suppress(ImportError):  # the rank imports it again, and tells
        importlib.import_module(target.partition(":")[0])
    gc.freeze()  # a collection in a rank would write to the pages that it shares


def _tell(leash: socket.socket, number: int) -> None:
    with contextlib.suppress(OSError):  # the driver may have let go of it
        leash.sendall(NUMBER.pack(number))


def _be_rank(order: ForkOrder, sock: socket.socket, lifeline_fd: int) -> NoReturn:
    """Runs the target and ends the process, past the exit handlers of whatever has been imported."""
    exit_code = 1
    try:
        tie_to_parent(lifeline_fd)
        _set_threads(order.num_threads)
        if sys.stderr is not None:  # it is None where descriptor 2 was closed
            faulthandler.enable()
        _call(order, Channel(sock))
        exit_code = 0
    except SystemExit as stop:
        exit_code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    finally:
        if (unforeseen := sys.exception()) is not None:
            traceback.print_exception(unforeseen)
        for stream in filter(None, (sys.stdout, sys.stderr)):
            stream.flush()
        os._exit(exit_code)


def _call(order: ForkOrder, channel: Channel) -> None:
    """Calls the target with its payload, which is the first frame of its channel."""
    with failures_told(channel, order.rank):
        module, _, function = order.target.partition(":")
        target = vars(importlib.import_module(module))[function]
        if (payload := channel.receive()) is not None:
            target(channel, payload, order.rank)


def tie_to_parent(lifeline_fd: int) -> None:
    """Makes this process end when its parent does, even if it is killed, stopped or busy in C.

    Args:
        lifeline_fd: the end to read of a pipe whose other end the driver holds, and never writes to.
    """

    def wait_for_the_end() -> None:
        os.read(lifeline_fd, 1)
        os._exit(1)

    threading.Thread(target=wait_for_the_end, name="lifeline", daemon=True).start()
    if sys.platform == "linux":
        parent_pid = os.getppid()
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent_pid:  # it died just before
            os._exit(1)


def _set_threads(num_threads: int) -> None:
    import torch  # the driver imports this module and needs no torch for it

    for name in _THREAD_VARIABLES:
        os.putenv(name, str(num_threads))  # for libraries that are loaded from here on
    torch.set_num_threads(num_threads)


if __name__ == "__main__":
    main()
