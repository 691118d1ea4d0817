"""Whatever goes wrong, as a JSON object: one sentence, never a traceback.

Clients of OpenAI and of Anthropic expect different shapes; the path tells which. Knows no engine.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Self

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.types import Scope

from kvspan.errors import EngineDeadError, KvspanError, LengthError, OutputError, RequestError

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
        param: the field that is to blame.
        code: OpenAI's word for it, if there is one.
        headers: of the reply.
    """

    def __init__(
        self,
        status: HTTPStatus,
        sentence: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(sentence)
        self.status, self.param, self.code = status, param, code
        self.headers = dict(headers or {})


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
                return cls(error.status, str(error), error.param, error.code, error.headers)
            case EngineDeadError():
                status = HTTPStatus.SERVICE_UNAVAILABLE
                return cls(status, str(error), code="engine_dead", headers={"Retry-After": "5"})
            case OutputError():
                # Clients of both APIs ask again after a 500, and would get the same.
                again = {"x-should-retry": "false"}
                status = HTTPStatus.INTERNAL_SERVER_ERROR
                return cls(status, str(error), code="output_error", headers=again)
        param = error.param if isinstance(error, RequestError) else None
        code = "context_length_exceeded" if isinstance(error, LengthError) else None
        return cls(HTTPStatus.BAD_REQUEST, str(error), param, code)

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


@contextmanager
def renamed(names: Mapping[str, str]) -> Iterator[None]:
    """Lets refusals from inside blame fields by the names that a route's clients have for them.

    Args:
        names: of a field here -> on the route.
    """
    try:
        yield
    except RequestError as error:
        if error.param is not None:
            error.param = names.get(error.param.split("[")[0].split(".")[0], error.param)
        raise


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
        return complaint(error.errors()).reply(request.scope)

    @app.exception_handler(ValidationError)  # of a body in the words of another route
    async def _invalid_there(request: Request, error: ValidationError) -> Response:
        return complaint(error.errors()).reply(request.scope)

    @app.exception_handler(HTTPException)
    async def _http(request: Request, error: HTTPException) -> Response:
        headers = dict(error.headers or {})
        sentence = _unreadable(error.__cause__) or _misdirected(error.status_code, request, headers)
        sentence = sentence or str(error.detail).rstrip(".") + "."
        return Complaint(error.status_code, sentence, headers=headers).reply(request.scope)

    @app.exception_handler(Exception)
    async def _unforeseen(request: Request, error: Exception) -> Response:
        logger.error("A request failed.", exc_info=error)
        sentence = f"The server failed on this request ({type(error).__name__}); its log says where."
        # The connection is closed after it, since what else the error has left undone is not known.
        headers = {"Connection": "close"}
        return Complaint(500, sentence, headers=headers).reply(request.scope)


def complaint(errors: Sequence[Mapping[str, Any]]) -> Complaint:
    """What is said of a body that is none of a route.

    Args:
        errors: of the library that reads it; the first is told.
    """
    first = errors[0]
    where, message = _path(first["loc"]), str(first["msg"]).removeprefix("Value error, ")
    about: Mapping[str, Any] = first.get("ctx") or {}
    if first["type"] == "json_invalid":
        return Complaint(400, f"The body is no valid JSON: {about.get('error', message)}.")
    if not where and first["type"] == "missing":
        return Complaint(400, f"The body is empty: send a JSON object with {_JSON}.")
    if not where and isinstance(first.get("input"), bytes):
        return Complaint(400, f"The body is read with {_JSON} alone.")
    if not where and first["type"] in ("model_attributes_type", "model_type", "dict_type"):
        return Complaint(400, f"The body must be a JSON object, got {_kind(first.get('input'))}.")
    return Complaint(400, _ended(_sentence(where, message, first)), about.get("param") or where or None)


_JSON = "the header Content-Type: application/json"


def _sentence(where: str, message: str, error: Mapping[str, Any]) -> str:
    value = error.get("input")
    match error["type"]:
        case "missing":
            return f"{where} is missing"
        case "too_short":
            return f"{where} is empty"
        case _ if not where:
            return f"The request is refused: {message}"
        case _ if message.startswith("Input should "):
            got = repr(value) if isinstance(value, bool | int | float) else _kind(value)
            return f"{where} must {message.removeprefix('Input should ')}, got {got}"
    return f"{where} {message}" if message.startswith("must ") else f"{where}: {message}"


def _ended(sentence: str) -> str:
    return sentence if sentence.endswith(("?", ".")) else f"{sentence}."


def _path(location: Sequence[str | int]) -> str:
    """E.g. `messages[0].content`."""
    parts = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in location if part != "body"]
    return "".join(parts).removeprefix(".")


def _kind(value: object) -> str:
    """What JSON calls it."""
    kinds = {str: "a text", list: "a list", dict: "an object", bool: "true or false", type(None): "null"}
    return kinds.get(type(value), "a number")


def _misdirected(status: int, request: Request, headers: Mapping[str, str]) -> str | None:
    """A sentence about a path or a method that is not there; None = that is not what is wrong."""
    path = request.url.path
    match status:
        case HTTPStatus.NOT_FOUND:
            return f"There is no {path} here: /openapi.json lists what there is."
        case HTTPStatus.METHOD_NOT_ALLOWED:
            return f"{path} takes no {request.method}: send {headers.get('Allow', 'another method')}."
    return None


def _unreadable(cause: BaseException | None) -> str | None:
    """A sentence about a body that could not be read; None = that is not what is wrong."""
    match cause:
        case UnicodeDecodeError():
            byte = cause.object[cause.start]
            return f"The body is no UTF-8: byte 0x{byte:02x} at {cause.start} begins no character."
        case RecursionError():
            return "The body is nested too deeply: lists and objects inside one another, some hundreds."
    return None
