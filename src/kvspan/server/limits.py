"""Who is let in, and with how much: API keys and the size of bodies. Plain ASGI, nothing per token."""

import hmac
from collections.abc import Sequence
from http import HTTPStatus

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvspan.metrics import Metric
from kvspan.server.errors import Complaint, is_messages
from kvspan.server.live.feed import KINDS

OPEN_PATHS = ("/health", "/ready", "/metrics", "/", *(f"/live/{name}" for name in KINDS))
"""Probes and scrapers come without a key, and so does the live page, which asks for one."""


class Refusals:
    """Counts the replies that refuse.

    Args:
        app: whose they are.
        counter: by HTTP status.
    """

    def __init__(self, app: ASGIApp, *, counter: Metric) -> None:
        self._app, self._counter = app, counter

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Lets everything through."""

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] >= HTTPStatus.BAD_REQUEST:
                self._counter.add(1, str(message["status"]))
            await send(message)

        await self._app(scope, receive, counted)


_TOO_LARGE = HTTPStatus.REQUEST_ENTITY_TOO_LARGE
_LAST = {"Connection": "close"}  # what is left of the body is not read


class KeyCheck:
    """Refuses requests without one of some keys.

    Args:
        app: what it guards.
        keys: one of which clients send, as `Authorization: Bearer KEY` or `x-api-key: KEY`.
    """

    def __init__(self, app: ASGIApp, *, keys: Sequence[str]) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Lets a request through, or answers 401."""
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or self._known(scope):
            await self._app(scope, receive, send)
            return
        name = "x-api-key: KEY" if is_messages(scope) else "Authorization: Bearer KEY"
        refusal = Complaint(
            HTTPStatus.UNAUTHORIZED,
            f"The API key is missing or wrong: send it as `{name}`.",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )
        await refusal.reply(scope)(scope, receive, send)

    def _known(self, scope: Scope) -> bool:
        if scope["method"] == "OPTIONS":  # browsers ask before they send a key
            return True
        sent = [_key(name, value) for name, value in scope["headers"]]
        # Every key is compared whole, so that the time tells nothing of any.
        matches = [hmac.compare_digest(a, key) for a in sent if a is not None for key in self._keys]
        return any(matches)


def _key(name: bytes, value: bytes) -> bytes | None:
    if name == b"x-api-key":
        return value
    scheme, _, key = value.partition(b" ")
    return key.strip() if name == b"authorization" and scheme.lower() == b"bearer" else None


class BodyLimit:
    """Refuses bodies that are too large: at their head if it tells, else as soon as they are.

    Args:
        app: what it guards.
        max_bytes: of a body.
    """

    def __init__(self, app: ASGIApp, *, max_bytes: int) -> None:
        self._app, self._max_bytes = app, max_bytes
        self._sentence = (
            f"The body has more than {max_bytes} bytes: send less, or raise --max-body-size."
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Lets a request through, or answers 413."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        told = dict(scope["headers"]).get(b"content-length", b"0")
        if told.isdigit() and int(told) > self._max_bytes:
            refusal = Complaint(_TOO_LARGE, self._sentence, headers=_LAST)
            await refusal.reply(scope)(scope, receive, send)
            return
        num_bytes = 0

        async def counted() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_bytes:
                raise HTTPException(_TOO_LARGE, self._sentence, _LAST)
            return message

        await self._app(scope, counted, send)
