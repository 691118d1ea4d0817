"""Whatever goes wrong, as a JSON object: one sentence, never a traceback.

Clients of OpenAI and of Anthropic expect different shapes; the path tells which. Knows no engine.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Self

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.types import Scope

from kvspan.errors import EngineDeadError, KvspanError, OutputError

logger = logging.getLogger("kvspan.server")

_TYPES = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
    HTTPStatus.INTERNAL_SERVER_ERROR: "server_error",
    HTTPStatus.SERVICE_UNAVAILABLE: "service_unavailable_error",
}

_ANTHROPIC_TYPES = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "request_too_large",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
    HTTPStatus.SERVICE_UNAVAILABLE: "overloaded_error",
}
_MESSAGES = "/v1/messages"


class RefusedError(KvspanError):
    """A request that is refused with a status of its own.

    Args:
        status: of HTTP.
        sentence: why, and the way out.
        code: OpenAI's word for it, if there is one.
        headers: of the reply.
    """

    def __init__(
        self,
        status: HTTPStatus,
        sentence: str,
        *,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(sentence)
        self.status, self.code, self.headers = status, code, dict(headers or {})


@dataclass(frozen=True, slots=True)
class Complaint:
    """What is said of a request that goes wrong.

    Args:
        status: of HTTP.
        sentence: why, and the way out.
        param: the field that is to blame.
        code: OpenAI's word for it, if there is one.
        headers: of the reply.
    """

    status: int
    sentence: str
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, error: KvspanError) -> Self:
        """What is said of a refusal or a failure."""
        match error:
            case RefusedError():
                return cls(error.status, str(error), code=error.code, headers=error.headers)
            case EngineDeadError():
                status = HTTPStatus.SERVICE_UNAVAILABLE
                return cls(status, str(error), code="engine_dead", headers={"Retry-After": "5"})
            case OutputError():
                # Clients of both APIs ask again after a 500, and would get the same.
                again = {"x-should-retry": "false"}
                status = HTTPStatus.INTERNAL_SERVER_ERROR
                return cls(status, str(error), code="output_error", headers=again)
        return cls(HTTPStatus.BAD_REQUEST, str(error))

    def reply(self, scope: Scope) -> Response:
        """The same as a reply, in the shape that clients of the path expect."""
        body = self.of_messages if is_messages(scope) else self.body
        return Response(body, self.status, headers=dict(self.headers), media_type="application/json")

    @property
    def body(self) -> bytes:
        """The JSON object that clients of OpenAI expect."""
        kind = _TYPES.get(HTTPStatus(self.status), "invalid_request_error")
        error = {"message": self.sentence, "type": kind, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error})

    @property
    def of_messages(self) -> bytes:
        """The JSON object that clients of Anthropic expect."""
        other = (
            "invalid_request_error" if self.status < HTTPStatus.INTERNAL_SERVER_ERROR else "api_error"
        )
        kind = _ANTHROPIC_TYPES.get(HTTPStatus(self.status), other)
        body = {"type": "error", "error": {"type": kind, "message": self.sentence}}
        return msgspec.json.encode(body)


def is_messages(scope: Scope) -> bool:
    """Whether a request speaks Anthropic's API."""
    path: str = scope["path"].removeprefix(scope.get("root_path", ""))
    return path == _MESSAGES or path.startswith(f"{_MESSAGES}/")


def add_handlers(app: FastAPI) -> None:
    """Makes the application answer errors in this shape."""

    @app.exception_handler(KvspanError)
    async def _refused(request: Request, error: KvspanError) -> Response:
        return Complaint.of(error).reply(request.scope)

    @app.exception_handler(RequestValidationError)
    async def _invalid(request: Request, error: RequestValidationError) -> Response:
        return complaint(error).reply(request.scope)

    @app.exception_handler(HTTPException)
    async def _http(request: Request, error: HTTPException) -> Response:
        sentence = _unreadable(error.__cause__) or str(error.detail).rstrip(".") + "."
        headers = dict(error.headers or {})
        return Complaint(error.status_code, sentence, headers=headers).reply(request.scope)

    @app.exception_handler(Exception)
    async def _unforeseen(request: Request, error: Exception) -> Response:
        logger.error("A request failed.", exc_info=error)
        sentence = f"The server failed on this request ({type(error).__name__}); its log says where."
        # The connection is closed after it, since what else the error has left undone is not known.
        headers = {"Connection": "close"}
        return Complaint(500, sentence, headers=headers).reply(request.scope)


def complaint(error: RequestValidationError) -> Complaint:
    """What is said of the first field that is wrong."""
    first = error.errors()[0]
    where = [str(part) for part in first["loc"] if part != "body"]
    message = str(first["msg"]).removeprefix("Value error, ")
    if first["type"] == "json_invalid":
        message = first.get("ctx", {}).get("error", message)
        return Complaint(400, f"The body is no valid JSON: {message}.")
    if not where and isinstance(first.get("input"), bytes):
        return Complaint(400, "The body is read with the header Content-Type: application/json alone.")
    if not where:
        end = "" if message.endswith("?") else "."
        return Complaint(400, f"The request is refused: {message}{end}")
    return Complaint(400, f"{'.'.join(where)}: {message}.", where[0])


def _unreadable(cause: BaseException | None) -> str | None:
    """A sentence about a body that could not be read; None = that is not what is wrong."""
    match cause:
        case UnicodeDecodeError():
            byte = cause.object[cause.start]
            return f"The body is no UTF-8: byte 0x{byte:02x} at {cause.start} begins no character."
        case RecursionError():
            return "The body is nested too deeply: lists and objects inside one another, some hundreds."
    return None
