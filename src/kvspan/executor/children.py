"""The driver's side of the fork-server: one for each driver process, and the children forked from it.

Knows processes and descriptors. Knows neither orders nor answers.
"""

import atexit
import itertools
import os
import socket
import subprocess
import sys
import threading
from dataclasses import dataclass

import msgspec

from kvspan.config.environment import ranks_environment
from kvspan.errors import EngineDeadError
from kvspan.executor.meeting_place import MeetingPlace
from kvspan.executor.zygote import FDS_AHEAD, ForkOrder
from kvspan.worker.messages import Channel

_END_S = 5.0  # that a zygote gets to end in; it needs a few milliseconds


@dataclass(frozen=True, slots=True)
class Child:
    """A rank's process as the driver holds it.

    Args:
        rank: of the process.
        channel: to its target.
        leash: to the zygote: brings the pid and later the exit code; shut, it has the rank killed.
    """

    rank: int
    channel: socket.socket
    leash: socket.socket

    def kill(self) -> None:
        """Has the process killed, even a stopped one; its exit code comes on the leash."""
        try:
            self.leash.shutdown(socket.SHUT_WR)
        except OSError:
            return  # the leash is closed: the process has ended

    def close(self) -> None:
        """Lets go of both sockets, which also ends a process that still runs."""
        self.channel.close()
        self.leash.close()


class ForkServer:
    """A zygote and what it takes to give it orders. It ends with this process, however that ends."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._meeting_place = MeetingPlace()
        self._numbers = itertools.count()
        self._control, theirs = socket.socketpair()
        lifeline_fd, self._lifeline_end = os.pipe()
        arguments = (str(theirs.fileno()), str(lifeline_fd), str(self._meeting_place.path))
        self._process = subprocess.Popen(
            # -P: a torch.py in the directory that the user happens to be in is not torch
            [sys.executable, "-P", "-m", "kvspan.executor.zygote", *arguments],
            stdin=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(), lifeline_fd),
            env=ranks_environment(),
            process_group=0,  # Ctrl-C at the terminal reaches the driver alone
        )
        theirs.close()
        os.close(lifeline_fd)
        atexit.register(self.close)
        os.register_at_fork(
            after_in_child=self._let_go_in_fork
        )  # a fork of the driver is not the driver

    @property
    def pid(self) -> int:
        """Of the zygote."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the zygote still runs."""
        return self._process.poll() is None

    def fork(self, target: str, *, rank: int, num_threads: int) -> Child:
        """Orders a rank and returns at once; the target runs when its channel has brought a payload.

        Args:
            target: "module:function", called with the `Channel`, the payload and the rank.
            rank: given to the target.
            num_threads: threads that torch may use there.

        Raises:
            EngineDeadError: the zygote has died.
        """
        (channel, their_channel), (leash, their_leash) = socket.socketpair(), socket.socketpair()
        order = msgspec.msgpack.encode(ForkOrder(target, rank, num_threads))
        with self._lock, their_channel, their_leash:
            try:
                socket.send_fds(
                    self._control, [FDS_AHEAD], [their_channel.fileno(), their_leash.fileno()]
                )
                Channel(self._control).send(order)
            except OSError as error:
                channel.close()
                leash.close()
                raise EngineDeadError(
                    f"The fork-server (pid {self.pid}) has died; start the engine again."
                ) from error
        return Child(rank, channel, leash)

    def private_path(self) -> str:
        """A path that nobody has used, for a file that ranks meet at; removed with the driver."""
        return str(self._meeting_place.meeting(next(self._numbers)))

    def close(self) -> None:
        """Ends the zygote and with it all of its ranks; a second call does nothing."""
        atexit.unregister(self.close)
        if not self._let_go():
            return
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._meeting_place.close()

    def _let_go(self) -> bool:
        """Closes what the zygote and its ranks watch; whether it was still open."""
        if self._control.fileno() < 0:
            return False
        self._control.close()
        os.close(self._lifeline_end)
        return True

    def _let_go_in_fork(self) -> None:
        if self._let_go():
            self._meeting_place.let_go()


_servers: dict[int, ForkServer] = {}  # by driver pid: a fork of the driver does not inherit it
_servers_lock = threading.Lock()


def fork_server() -> ForkServer:
    """This process's fork-server, started at the first call and again if it has died."""
    with _servers_lock:
        server = _servers.get(os.getpid())
        if server is not None and not server.alive:
            server.close()
            server = None
        if server is None:
            server = _servers[os.getpid()] = ForkServer()
        return server
