"""`POST /v1/responses`."""

from typing import Any

from fastapi import APIRouter, Request
from fastapi import Response as HttpResponse

from kvspan.clock import unix_s
from kvspan.server.blocks import Answering
from kvspan.server.errors import renamed
from kvspan.server.response_events import Response
from kvspan.server.responses import NAMES, ResponsesRequest, to_chat
from kvspan.server.served import served
from kvspan.server.sse import EventStream, JsonReply
from kvspan.server.telemetry import trace_headers

router = APIRouter()


@router.post("/v1/responses")
async def create(body: ResponsesRequest, request: Request) -> HttpResponse:
    """Answers a conversation."""
    here = served(request)
    model = here.model_name(body.model)
    conversation = to_chat(body)
    with renamed(NAMES):
        answering = await Answering.begin(here, conversation, trace_headers(request))
    response = Response(answering, body, model=model, created_s=int(unix_s()))
    abort = answering.stream.abort
    asked = "max_output_tokens", body.max_output_tokens
    headers = here.note_room(asked, len(answering.generation.prompt_ids), answering.notes)
    if body.stream:
        return EventStream(response.events(), on_gone=abort, headers=headers)

    async def whole() -> dict[str, Any]:
        await answering.wait()
        return response.whole()

    return JsonReply(whole(), on_gone=abort, headers=headers)
