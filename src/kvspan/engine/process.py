"""An engine's process as an event loop holds it: started, spoken to, listened to, ended.

What comes from it are frames; what they say is its owner's business. A process whose heart is silent for
too long is killed, and ends like any other that is lost.
"""

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import cast

from kvspan.clock import Clock
from kvspan.engine.heartbeat import BEAT_S, Listener
from kvspan.engine.messages import Order, encode
from kvspan.executor.crew import Inbox, ending_of
from kvspan.worker.messages import LENGTH

_BUFFER_BYTES = 1 << 21
_ENDS_S = 0.1
"""That a process may take to end when it has hung up; the event loop waits for it."""


class EngineProcess(asyncio.Protocol):
    """A running engine and the connection to it. Closed, it lets go of the engine, which ends then.

    Args:
        environment: of the process; None = that of this one.
        patience_s: seconds that it may be silent.
        clock: to measure them.
        heard: called with the body of each report.
        lost: called when it has hung up, with a sentence that says how.
    """

    def __init__(
        self,
        *,
        environment: Mapping[str, str] | None,
        patience_s: float,
        clock: Clock,
        heard: Callable[[bytes], None],
        lost: Callable[[str], None],
    ) -> None:
        self._heard, self._lost = heard, lost
        self._inbox = Inbox()
        self._transport: asyncio.WriteTransport | None = None
        self._why_lost = ""
        self._check: asyncio.TimerHandle | None = None
        self._sock, theirs = socket.socketpair()
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
        lifeline, self._lifeline_end = os.pipe()
        heart_end, heart = os.pipe()
        self._listener = Listener(heart_end, patience_s=patience_s, clock=clock)
        descriptors = (theirs.fileno(), lifeline, heart)
        # From this thread: the engine ends with the thread that has started it.
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "kvspan.engine.service", *map(str, descriptors)],
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr if sys.stderr is not None else subprocess.DEVNULL,
            pass_fds=descriptors,
            env=environment,
            process_group=0,  # Ctrl-C at the terminal reaches the server alone
        )
        theirs.close()
        os.close(lifeline)
        os.close(heart)

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    async def connect(self) -> None:
        """Makes it ready to be spoken to."""
        await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=self._sock)

    def tell(self, order: Order) -> None:
        """Sends an order."""
        self.send(encode(order))

    def send(self, body: bytes) -> None:
        """Sends an order that is encoded already; what has hung up gets nothing."""
        assert self._transport is not None, "it is connected by now"
        self._transport.write(LENGTH.pack(len(body)) + body)

    async def end(self, patience_s: float) -> None:
        """Waits for the process to end, kills it if it does not, and lets go of it."""
        loop = asyncio.get_running_loop()
        if self._transport is None:  # given up before it was spoken to
            self._sock.close()
            self._let_go()
        try:
            await loop.run_in_executor(None, lambda: self._process.wait(patience_s))
        except subprocess.TimeoutExpired:
            self._process.kill()
            await loop.run_in_executor(None, self._process.wait)
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It can be spoken to."""
        self._transport = cast(asyncio.WriteTransport, transport)  # uvloop's is none by its class
        self._check_later()

    def data_received(self, data: bytes) -> None:
        """It has said something."""
        for body in self._inbox.feed(data):
            self._heard(body)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 (it ends either way)
        """It has hung up."""
        assert self._check is not None, "it was connected"
        self._check.cancel()
        self._let_go()
        self._lost(self._why_lost or self._ending())

    def _ending(self) -> str:
        """How it has ended; it does within a moment of hanging up."""
        try:
            return f"The engine's process {ending_of(self._process.wait(_ENDS_S))}."
        except subprocess.TimeoutExpired:
            return "The engine's process has hung up."

    def _let_go(self) -> None:
        """Closes what the engine watches."""
        self._listener.close()
        os.close(self._lifeline_end)

    def _check_later(self) -> None:
        self._check = asyncio.get_running_loop().call_later(BEAT_S, self._check_heart)

    def _check_heart(self) -> None:
        if not self._listener.is_silent():
            self._check_later()
            return
        self._why_lost = (
            f"The engine's process gave no sign of life for {self._listener.patience_s:g} s "
            "(--engine-timeout), and was killed."
        )
        self._process.kill()  # a stopped process too; the connection closes with it
