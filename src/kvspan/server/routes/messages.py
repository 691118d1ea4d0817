"""`POST /v1/messages` and `POST /v1/messages/count_tokens`."""

from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from kvspan.server import messages
from kvspan.server.blocks import Answering
from kvspan.server.conversation import prepare
from kvspan.server.messages import CountRequest, MessagesRequest
from kvspan.server.served import served
from kvspan.server.sse import EventStream, JsonReply
from kvspan.server.telemetry import trace_headers

router = APIRouter()


@router.post("/v1/messages")
async def create(body: MessagesRequest, request: Request) -> Response:
    """Answers a conversation."""
    here = served(request)
    model = here.model_name(body.model)
    answering = await Answering.begin(here, messages.to_chat(body), trace_headers(request))
    abort = answering.stream.abort
    asked = "max_tokens", body.max_tokens
    headers = here.note_room(asked, len(answering.generation.prompt_ids), answering.notes)
    if body.stream:
        return EventStream(messages.message_events(answering, model), on_gone=abort, headers=headers)

    async def whole() -> dict[str, Any]:
        await answering.wait()
        return messages.message(answering, model)

    return JsonReply(whole(), on_gone=abort, headers=headers)


@router.post("/v1/messages/count_tokens")
async def count_tokens(body: CountRequest, request: Request) -> Response:
    """Tokens that a conversation would take."""
    here = served(request)
    here.model_name(body.model)
    conversation = await prepare(here, messages.count_to_chat(body))
    found = {"input_tokens": len(conversation.prompt_ids)}
    return Response(msgspec.json.encode(found), media_type="application/json")
