"""Chat templates at work, off the event loop: a slow one keeps its own request waiting, and nobody else.

Knows threads and a limit. Knows no template.
"""

import asyncio
import contextlib
import ctypes
import threading
from collections.abc import Callable
from concurrent.futures import Future
from http import HTTPStatus

from kvspan.errors import RequestError
from kvspan.server.errors import RefusedError

LIMIT_S = 30.0
"""For one conversation, waiting included: those of 100,000 tokens take tenths of a second."""

NUM_THREADS = 4
"""At a time. They share one interpreter with the event loop, so more of them would only slow it down."""


class Writers:
    """Threads in which conversations are written.

    A template that takes too long is stopped between two steps of Python. What is one step, e.g. a text
    times a billion, keeps its thread until it is done, and when all are kept nothing is written; no
    thread holds up an exit.

    Args:
        limit_s: seconds that a conversation may take.
        num_threads: conversations at a time.
    """

    def __init__(self, *, limit_s: float = LIMIT_S, num_threads: int = NUM_THREADS) -> None:
        self._limit_s, self._num_threads = limit_s, num_threads
        self._free = asyncio.Semaphore(num_threads)
        self._late: set[_Writing] = set()

    async def write(self, render: Callable[[], str]) -> str:
        """What `render` makes, in a thread.

        Args:
            render: runs a template; its errors are raised here.

        Raises:
            RequestError: it takes too long.
            RefusedError: 503, the server ends meanwhile, or every thread is kept by a template that has
                taken too long and cannot be stopped.
        """
        if len(self._late) == self._num_threads:
            raise self._refusal(
                f"All {self._num_threads} threads that write conversations are kept by chat templates "
                f"that have taken more than {self._limit_s:g} s: start the server with another "
                "--chat-template."
            )
        writing: _Writing | None = None
        try:
            async with asyncio.timeout(self._limit_s):
                await self._free.acquire()
                writing = self._begun(render)
                return await asyncio.wrap_future(writing.text)
        except TimeoutError:
            if writing is not None and writing.stop():
                self._late.add(writing)
            raise RequestError(
                f"The chat template has not written the messages within {self._limit_s:g} s: send fewer "
                "messages, or start the server with a faster --chat-template."
            ) from None
        except asyncio.CancelledError:  # by the server alone: who waited for it would be told nothing
            raise self._refusal("The server has ended before the messages were written.") from None

    def _begun(self, render: Callable[[], str]) -> "_Writing":
        loop = asyncio.get_running_loop()

        def ended() -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended before the template
                loop.call_soon_threadsafe(over)

        def over() -> None:
            self._late.discard(writing)
            self._free.release()

        writing = _Writing(render, ended)
        return writing

    @staticmethod
    def _refusal(sentence: str) -> RefusedError:
        return RefusedError(HTTPStatus.SERVICE_UNAVAILABLE, sentence)


class _StoppedError(BaseException):
    """Raised in a thread whose work nobody waits for; no template can catch it."""


class _Writing:
    """A conversation that is being written, in a thread of its own.

    Args:
        render: runs a template.
        ended: called in the thread when it has ended, however it did.
    """

    def __init__(self, render: Callable[[], str], ended: Callable[[], None]) -> None:
        self.text: Future[str] = Future()
        self._render, self._ended = render, ended
        self._changes = threading.Lock()
        self._is_over = False
        self._thread = threading.Thread(target=self._work, name="chat-template", daemon=True)
        self._thread.start()

    def stop(self) -> bool:
        """Has the template stop at its next step of Python; False if it has ended already."""
        with self._changes:
            if self._is_over:
                return False
            number = ctypes.c_ulong(self._thread.ident or 0)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(number, ctypes.py_object(_StoppedError))
            return True

    def _work(self) -> None:
        try:
            if self.text.set_running_or_notify_cancel():
                self.text.set_result(self._rendered())
        except BaseException as error:  # noqa: BLE001 (whoever waits gets it)
            self.text.set_exception(error)
        finally:
            self._ended()

    def _rendered(self) -> str:
        try:
            return self._render()
        finally:
            with self._changes:  # whoever stops it does so before this, or not at all
                self._is_over = True
