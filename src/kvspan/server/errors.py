"""Whatever goes wrong, as an OpenAI-shaped JSON object: one sentence, never a traceback."""

import logging
from collections.abc import Mapping
from http import HTTPStatus

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from kvspan.errors import EngineDeadError, KvspanError

logger = logging.getLogger("kvspan.server")

_TYPES = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
    HTTPStatus.INTERNAL_SERVER_ERROR: "server_error",
    HTTPStatus.SERVICE_UNAVAILABLE: "service_unavailable_error",
}


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


def error_body(
    status: int, sentence: str, *, param: str | None = None, code: str | None = None
) -> bytes:
    """The JSON object that clients of OpenAI expect.

    Args:
        status: of HTTP.
        sentence: why, and the way out.
        param: the field that is to blame.
        code: OpenAI's word for it, if there is one.
    """
    kind = _TYPES.get(HTTPStatus(status), "invalid_request_error")
    error = {"message": sentence, "type": kind, "param": param, "code": code}
    return msgspec.json.encode({"error": error})


def error_of(error: KvspanError) -> tuple[HTTPStatus, bytes, dict[str, str]]:
    """Status, body and headers for a refusal or a failure."""
    if isinstance(error, RefusedError):
        return error.status, error_body(error.status, str(error), code=error.code), error.headers
    if isinstance(error, EngineDeadError):
        status = HTTPStatus.SERVICE_UNAVAILABLE
        return status, error_body(status, str(error), code="engine_dead"), {"Retry-After": "5"}
    return HTTPStatus.BAD_REQUEST, error_body(HTTPStatus.BAD_REQUEST, str(error)), {}


def error_response(error: KvspanError) -> Response:
    """A refusal or a failure as a reply."""
    status, body, headers = error_of(error)
    return _reply(status, body, headers)


def add_handlers(app: FastAPI) -> None:
    """Makes the application answer errors in this shape."""

    @app.exception_handler(KvspanError)
    async def _refused(_request: Request, error: KvspanError) -> Response:
        return error_response(error)

    @app.exception_handler(RequestValidationError)
    async def _invalid(_request: Request, error: RequestValidationError) -> Response:
        sentence, param = complaint(error)
        return _reply(400, error_body(400, sentence, param=param), {})

    @app.exception_handler(HTTPException)
    async def _http(_request: Request, error: HTTPException) -> Response:
        sentence = str(error.detail).rstrip(".") + "."
        return _reply(
            error.status_code, error_body(error.status_code, sentence), dict(error.headers or {})
        )

    @app.exception_handler(Exception)
    async def _unforeseen(_request: Request, error: Exception) -> Response:
        logger.error("A request failed.", exc_info=error)
        sentence = f"The server failed on this request ({type(error).__name__}); its log says where."
        return _reply(500, error_body(500, sentence), {})


def _reply(status: int, body: bytes, headers: Mapping[str, str]) -> Response:
    return Response(body, status, headers=dict(headers), media_type="application/json")


def complaint(error: RequestValidationError) -> tuple[str, str | None]:
    """A sentence about the first field that is wrong, and its name."""
    first = error.errors()[0]
    where = [str(part) for part in first["loc"] if part != "body"]
    message = str(first["msg"]).removeprefix("Value error, ")
    if first["type"] == "json_invalid":
        return f"The body is no valid JSON: {first.get('ctx', {}).get('error', message)}.", None
    if not where:
        return f"The request is refused: {message}.", None
    return f"{'.'.join(where)}: {message}.", where[0]
