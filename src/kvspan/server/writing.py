"""Chat templates at work, off the event loop: a slow one keeps its own request waiting, and nobody else.

Knows threads and a limit. Knows no template.
"""

import asyncio
import contextlib
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

    A template that runs for ever keeps its thread, since nothing can stop it, but holds up no exit.

    Args:
        limit_s: seconds that a conversation may take.
        num_threads: conversations at a time.
    """

    def __init__(self, *, limit_s: float = LIMIT_S, num_threads: int = NUM_THREADS) -> None:
        self._limit_s = limit_s
        self._free = asyncio.Semaphore(num_threads)

    async def write(self, render: Callable[[], str]) -> str:
        """What `render` makes, in a thread.

        Args:
            render: runs a template; its errors are raised here.

        Raises:
            RequestError: it takes too long.
            RefusedError: 503, the server ends meanwhile.
        """
        try:
            async with asyncio.timeout(self._limit_s):
                await self._free.acquire()
                return await asyncio.wrap_future(self._begun(render))
        except TimeoutError:
            raise RequestError(
                f"The chat template has not written the messages within {self._limit_s:g} s: send fewer "
                "messages, or start the server with a faster --chat-template."
            ) from None
        except asyncio.CancelledError:  # by the server alone: who waited for it would be told nothing
            raise RefusedError(
                HTTPStatus.SERVICE_UNAVAILABLE, "The server has ended before the messages were written."
            ) from None

    def _begun(self, render: Callable[[], str]) -> Future[str]:
        loop = asyncio.get_running_loop()
        text: Future[str] = Future()

        def work() -> None:
            try:
                if text.set_running_or_notify_cancel():
                    text.set_result(render())
            except BaseException as error:  # noqa: BLE001 (whoever waits gets it)
                text.set_exception(error)
            finally:
                with contextlib.suppress(RuntimeError):  # the loop has ended before the template
                    loop.call_soon_threadsafe(self._free.release)

        threading.Thread(target=work, name="chat-template", daemon=True).start()
        return text
