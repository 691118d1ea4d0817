"""HTTP connections with time limits: whoever sends slowly, or nothing, does not keep a connection.

uvicorn closes connections that idle after a reply. What it waits for without limit is the first byte of
a request, the rest of its head, and its body; so slow clients could hold every descriptor.
"""

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from kvspan.config.server import ServerConfig


class TimedProtocol(HttpToolsProtocol):
    """uvicorn's protocol, which closes a connection whose request is late."""

    header_timeout_s = 10.0
    body_timeout_s = 60.0
    _deadline: asyncio.TimerHandle | None = None

    @classmethod
    def with_limits(cls, config: ServerConfig) -> type["TimedProtocol"]:
        """The same with the limits of a server."""
        limits = {
            "header_timeout_s": config.header_timeout,
            "body_timeout_s": config.body_timeout,
        }
        return type("LimitedProtocol", (cls,), limits)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has come; its first request is due."""
        super().connection_made(transport)
        self._expect(self.header_timeout_s)

    def connection_lost(self, exc: Exception | None) -> None:
        """It has gone."""
        self._expect(None)
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        """The head of a request is due."""
        self._expect(self.header_timeout_s)
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Its body is due."""
        self._expect(self.body_timeout_s)
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """Nothing is due: the reply takes as long as it takes."""
        self._expect(None)
        super().on_message_complete()

    def _expect(self, within_s: float | None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = None if within_s is None else self.loop.call_later(within_s, self._late)

    def _late(self) -> Any:
        self.transport.close()
