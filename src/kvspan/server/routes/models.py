"""What is served, and its tokens: `/v1/models`, `/version`, `/tokenize`, `/detokenize`, and health."""

from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST

import kvspan
from kvspan.server.conversation import write
from kvspan.server.exposition import exposition
from kvspan.server.prompts import encode
from kvspan.server.protocol import DetokenizeRequest, TokenizeRequest
from kvspan.server.served import Served, served

router = APIRouter()


@router.get("/v1/models")
async def models(request: Request) -> Response:
    """The names of the model."""
    here = served(request)
    return _json({"object": "list", "data": [_card(here, name) for name in here.names]})


@router.get("/v1/models/{name:path}")
async def model(name: str, request: Request) -> Response:
    """One name of the model."""
    here = served(request)
    return _json(_card(here, here.model_name(name)))


@router.get("/version")
async def version() -> Response:
    """Which kvspan this is."""
    return _json({"version": kvspan.__version__})


@router.get("/health")
async def health(request: Request) -> Response:
    """Whether the server lives: 503 when its engine is gone for good."""
    state = served(request).llm.health
    return _json({"live": not state.gone, "why": state.why}, 503 if state.gone else 200)


@router.get("/ready")
async def ready(request: Request) -> Response:
    """Whether requests are worked on now: 503 while ranks are started again, and while it drains."""
    here = served(request)
    state = here.llm.health
    is_ready = state.ready and not here.draining
    why = "The server is about to end." if here.draining else state.why
    return _json({"ready": is_ready, "why": why}, 200 if is_ready else 503)


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Everything that is measured, for Prometheus."""
    here = served(request)
    return Response(exposition(here.llm.metrics()), media_type=CONTENT_TYPE_LATEST)


@router.post("/tokenize")
async def tokenize(body: TokenizeRequest, request: Request) -> Response:
    """Tokens of a prompt or of a conversation."""
    here = served(request)
    here.model_name(body.model)
    tokenizer = here.chat_tokenizer(body.chat_template)
    if body.messages is not None:
        text = await write(here, tokenizer, body)
    else:
        text = body.prompt or ""
    ids = await encode(tokenizer, text, add_special_tokens=body.add_special_tokens)
    found: dict[str, Any] = {
        "count": len(ids),
        "max_model_len": here.llm.resolved.max_model_len,
        "tokens": ids,
    }
    if body.return_token_strs:
        found["token_strs"] = [tokenizer.id_to_token(token_id) or "" for token_id in ids]
    return _json(found)


@router.post("/detokenize")
async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
    """The text of tokens, special ones spelled out."""
    here = served(request)
    here.model_name(body.model)
    here.check_ids(body.tokens)
    text = here.llm.get_tokenizer().decode(body.tokens, skip_special_tokens=False)
    return _json({"prompt": text})


def _card(here: Served, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": here.created_s,
        "owned_by": "kvspan",
        "root": here.llm.resolved.model,
        "max_model_len": here.llm.resolved.max_model_len,
    }


def _json(body: dict[str, Any], status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status, media_type="application/json")
