"""Replies that wait for the engine, and are given up when their reader goes away.

Knows ASGI and server-sent events. Knows no engine.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from typing import Any

import msgspec
from fastapi import Response
from starlette.types import Receive, Scope, Send

from kvspan.errors import KvspanError
from kvspan.server.errors import Complaint

DONE = b"data: [DONE]\n\n"
"""The last event of OpenAI's streams."""


def event(body: object) -> bytes:
    """One event with a JSON body."""
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


class JsonReply(Response):
    """A JSON body that takes a while to make.

    Args:
        work: makes the body.
        on_gone: called when the reader goes away, and at the end.
        headers: of the reply.
    """

    def __init__(
        self,
        work: Coroutine[Any, Any, object],
        *,
        on_gone: Callable[[], None],
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__()
        self._work, self._on_gone, self._more = work, on_gone, headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Waits for the body and writes it."""
        with watched(receive, self._on_gone):
            try:
                body = msgspec.json.encode(await self._work)
                reply = Response(body, headers=self._more, media_type="application/json")
            except KvspanError as error:
                reply = Complaint.of(error).reply(scope)
        await reply(scope, receive, send)


class EventStream(Response):
    """A stream of events. What comes at once is written at once.

    The status waits for the first batch, so that what fails before it is an error like any other. What
    fails later is an event.

    Args:
        batches: of events; each is one write.
        on_gone: called when the reader goes away, and at the end.
        headers: more of them.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        batches: AsyncIterator[bytes],
        *,
        on_gone: Callable[[], None],
        headers: Mapping[str, str] | None = None,
    ) -> None:
        unbuffered = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(headers={**unbuffered, **(headers or {})})
        del self.headers["content-length"]
        self._batches, self._on_gone = batches, on_gone

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Writes the stream."""
        with watched(receive, self._on_gone):
            try:
                first = await anext(self._batches, b"")
            except KvspanError as error:
                await Complaint.of(error).reply(scope)(scope, receive, send)
                return
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": first, "more_body": True})
            try:
                async for batch in self._batches:
                    await send({"type": "http.response.body", "body": batch, "more_body": True})
            except KvspanError as error:
                said = b"data: " + Complaint.of(error).body + b"\n\n"
                await send({"type": "http.response.body", "body": said, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})


@contextlib.contextmanager
def watched(receive: Receive, on_gone: Callable[[], None]) -> Iterator[None]:
    """Calls `on_gone` as soon as the reader goes away, and at the end of the block."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        on_gone()

    task = asyncio.create_task(watch())
    try:
        yield
    finally:
        task.cancel()
        on_gone()
