"""`POST /v1/messages` and `POST /v1/messages/count_tokens`, whose errors have Anthropic's shape too."""

from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute

from kvspan.errors import KvspanError
from kvspan.server import messages
from kvspan.server.blocks import Answering
from kvspan.server.conversation import prepare
from kvspan.server.errors import complaint, error_of
from kvspan.server.messages import CountRequest, MessagesRequest
from kvspan.server.served import served
from kvspan.server.sse import EventStream, JsonReply


class _Route(APIRoute):
    """A route whose refusals are Anthropic's."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The handler, with refusals caught."""
        handler = super().get_route_handler()

        async def caught(request: Request) -> Response:
            try:
                return await handler(request)
            except KvspanError as error:
                status, body, headers = error_of(error)
                sentence = msgspec.json.decode(body)["error"]["message"]
                return _refusal(int(status), sentence, headers)
            except RequestValidationError as error:
                return _refusal(400, complaint(error)[0], {})

        return caught


router = APIRouter(route_class=_Route)


@router.post("/v1/messages")
async def create(body: MessagesRequest, request: Request) -> Response:
    """Answers a conversation."""
    here = served(request)
    model = here.model_name(body.model)
    answering = await Answering.begin(here, messages.to_chat(body))
    abort = answering.stream.abort
    if body.stream:
        return EventStream(messages.message_events(answering, model), on_gone=abort)

    async def whole() -> dict[str, Any]:
        await answering.wait()
        return messages.message(answering, model)

    return JsonReply(whole(), on_gone=abort)


@router.post("/v1/messages/count_tokens")
async def count_tokens(body: CountRequest, request: Request) -> Response:
    """Tokens that a conversation would take."""
    here = served(request)
    here.model_name(body.model)
    conversation = await prepare(here, messages.count_to_chat(body))
    found = {"input_tokens": len(conversation.prompt_ids)}
    return Response(msgspec.json.encode(found), media_type="application/json")


_KINDS = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def _refusal(status: int, sentence: str, headers: dict[str, str]) -> Response:
    kind = _KINDS.get(status, "invalid_request_error" if status < 500 else "api_error")
    body = {"type": "error", "error": {"type": kind, "message": sentence}}
    return Response(msgspec.json.encode(body), status, headers, "application/json")
