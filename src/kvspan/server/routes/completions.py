"""`POST /v1/chat/completions` and `POST /v1/completions`."""

import asyncio
from uuid import uuid4

from fastapi import APIRouter, Request, Response

from kvspan.clock import unix_s
from kvspan.errors import blaming
from kvspan.server import chat, completions
from kvspan.server.conversation import prepare
from kvspan.server.errors import renamed
from kvspan.server.forms import form_field, form_notes
from kvspan.server.logprobs import TokenNames
from kvspan.server.prompts import decode_all, encode_all
from kvspan.server.protocol import ChatRequest, CompletionRequest
from kvspan.server.sampling import completion_params
from kvspan.server.served import Served, served
from kvspan.server.sse import EventStream, JsonReply
from kvspan.server.telemetry import trace_headers

router = APIRouter()

_CHAT_NAMES = {"prompt": "messages", "logprobs": "top_logprobs"}
"""Fields of completions -> those that clients of the chat route know."""


@router.post("/v1/chat/completions")
async def chat_completions(body: ChatRequest, request: Request) -> Response:
    """Answers a conversation."""
    here = served(request)
    model = here.model_name(body.model)
    conversation = await prepare(here, body)
    here.admit(conversation.params.n)
    asked = chat.Asked(
        request=body,
        reply_id=f"chatcmpl-{uuid4().hex}",
        model=model,
        created_s=int(unix_s()),
        names=_names(here, as_ids=bool(body.return_tokens_as_token_ids)),
        parsers=conversation.parser,
    )
    with renamed(_CHAT_NAMES):
        stream = here.llm.add(
            {"prompt_token_ids": conversation.prompt_ids},
            conversation.params,
            priority=body.priority,
            cache_salt=body.cache_salt or "",
            trace_headers=trace_headers(request),
        )
    headers = here.note_room(body.asked_tokens, len(conversation.prompt_ids), conversation.notes)
    if body.stream:
        return EventStream(chat.answer_chunks(stream, asked), on_gone=stream.abort, headers=headers)
    return JsonReply(chat.whole_answer(stream, asked), on_gone=stream.abort, headers=headers)


@router.post("/v1/completions")
async def text_completions(body: CompletionRequest, request: Request) -> Response:
    """Completes one prompt or several."""
    here = served(request)
    model = here.model_name(body.model)
    params = completion_params(body, here.default_sampling)
    notes = await form_notes(params.structured_outputs, form_field(body))
    prompts = await _prompts(here, body)
    if params.structured_outputs is not None:
        with blaming(form_field(body)):
            await asyncio.to_thread(here.llm.check_form, params)
    here.admit(params.n * len(prompts))
    asked = completions.Asked(
        request=body,
        reply_id=f"cmpl-{uuid4().hex}",
        model=model,
        created_s=int(unix_s()),
        names=_names(here, as_ids=bool(body.return_tokens_as_token_ids)),
        prompts=tuple(text for text, _ in prompts),
    )
    with renamed({"structured_outputs": form_field(body)}):
        streams = here.llm.add_all(
            [{"prompt_token_ids": ids} for _, ids in prompts],
            params,
            priority=body.priority,
            cache_salt=body.cache_salt or "",
            trace_headers=trace_headers(request),
        )

    def abort() -> None:
        for stream in streams:
            stream.abort()

    headers = here.note_room(("max_tokens", body.max_tokens), max(len(ids) for _, ids in prompts), notes)
    if body.stream:
        return EventStream(completions.text_chunks(streams, asked), on_gone=abort, headers=headers)
    return JsonReply(completions.whole_texts(streams, asked), on_gone=abort, headers=headers)


async def _prompts(here: Served, body: CompletionRequest) -> list[tuple[str, list[int]]]:
    """Text and token ids of each prompt; the text is empty unless it is echoed."""
    prompts = _as_several(body.prompt)
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    if texts:  # then all are: a list is of one kind
        tokenizer = here.llm.get_tokenizer()
        with blaming("prompt"):
            found = await encode_all(tokenizer, texts, add_special_tokens=body.add_special_tokens)
        return list(zip(texts, found, strict=True))
    ids = [prompt for prompt in prompts if not isinstance(prompt, str)]
    echoed = await decode_all(here.llm.get_tokenizer(), ids) if body.echo else [""] * len(ids)
    return list(zip(echoed, ids, strict=True))


def _as_several(prompt: str | list[int] | list[str] | list[list[int]]) -> list[str | list[int]]:
    if isinstance(prompt, str) or not prompt or isinstance(prompt[0], int):
        return [prompt]  # type: ignore[list-item]
    return prompt  # type: ignore[return-value]


def _names(here: Served, *, as_ids: bool) -> TokenNames:
    return TokenNames(here.token_bytes, as_ids=as_ids)
