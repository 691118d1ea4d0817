"""Anthropic's `/v1/messages`, translated: requests to the chat route's words, blocks to content blocks.

Knows both sets of names. Knows no engine but what `Answering` shows of it.
"""

import json
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Annotated, Any, ClassVar
from uuid import uuid4

import msgspec
from pydantic import Field

from kvspan.errors import KvspanError, RequestError
from kvspan.server.blocks import Answering, Block, BlockKind, Change, Closed, Grown, Opened
from kvspan.server.protocol import Body, ChatRequest, Priority, one_of

IGNORED = frozenset(
    {"betas", "context_management", "container", "mcp_servers", "output_config", "inference_geo"}
)
"""Fields that its clients send and that change nothing here."""


System = Annotated[str | list[dict[str, Any]] | None, one_of("a text or a list of blocks")]


class MessagesRequest(Body):
    """`POST /v1/messages`."""

    ignored: ClassVar[frozenset[str]] = IGNORED

    model: str | None = None
    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    max_tokens: int
    system: System = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    priority: Priority = 0
    cache_salt: str | None = None


class CountRequest(Body):
    """`POST /v1/messages/count_tokens`."""

    ignored: ClassVar[frozenset[str]] = IGNORED

    model: str | None = None
    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    system: System = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None


def to_chat(body: MessagesRequest) -> ChatRequest:
    """The same conversation in the words of the chat route.

    Raises:
        RequestError: it has something that models here do not read.
    """
    choice, parallel = _choice(body.tool_choice)
    return ChatRequest(
        model=body.model,
        messages=_conversation(body.system, body.messages),
        max_tokens=body.max_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        stop=body.stop_sequences or None,
        stream=bool(body.stream),
        tools=_tools(body.tools),
        tool_choice=choice,
        parallel_tool_calls=parallel,
        chat_template_kwargs=_thinking(body.thinking),
        priority=body.priority,
        cache_salt=body.cache_salt,
    )


def count_to_chat(body: CountRequest) -> ChatRequest:
    """The conversation whose tokens are counted, in the words of the chat route."""
    return ChatRequest(
        messages=_conversation(body.system, body.messages),
        tools=_tools(body.tools),
        chat_template_kwargs=_thinking(body.thinking),
    )


def message(answering: Answering, model: str) -> dict[str, Any]:
    """The reply, once the answer is whole."""
    return {
        **_head(model),
        "content": [_content(block) for block in answering.blocks.whole],
        **_ending(answering),
        "usage": _usage(answering),
    }


async def message_events(answering: Answering, model: str) -> AsyncIterator[bytes]:
    """The reply as events; what a step gave is one batch."""
    begun = False
    try:
        async for changes in answering.changes():
            batch = [each for change in changes for each in _events(change)]
            if not begun:
                begun = True
                batch.insert(0, _opening(answering, model))
            if batch:
                yield b"".join(batch)
    except KvspanError as error:
        if not begun:
            raise
        yield _event("error", error={"type": "api_error", "message": str(error)})
        return
    last = {"delta": _ending(answering), "usage": _usage(answering)}
    yield _event("message_delta", **last) + _event("message_stop")


def _opening(answering: Answering, model: str) -> bytes:
    usage = {**_usage(answering), "output_tokens": 0}
    empty: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
    return _event("message_start", message={**_head(model), **empty})


def _events(change: Change) -> Iterator[bytes]:
    index = change.block.index
    match change:
        case Opened(block):
            yield _event("content_block_start", index=index, content_block=_content(_empty(block)))
        case Grown(block, text):
            yield _event("content_block_delta", index=index, delta=_delta(block.kind, text))
        case Closed():
            yield _event("content_block_stop", index=index)


def _event(kind: str, **fields: Any) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (kind.encode(), msgspec.json.encode({"type": kind, **fields}))


def _head(model: str) -> dict[str, Any]:
    return {"id": f"msg_{uuid4().hex[:24]}", "type": "message", "role": "assistant", "model": model}


def _empty(block: Block) -> Block:
    return Block(block.kind, block.index, block.call_id, block.name)


def _content(block: Block) -> dict[str, Any]:
    match block.kind:
        case BlockKind.THOUGHT:
            return {"type": "thinking", "thinking": block.text, "signature": ""}
        case BlockKind.TEXT:
            return {"type": "text", "text": block.text}
    call = {"type": "tool_use", "id": block.call_id, "name": block.name}
    return {**call, "input": json.loads(block.text or "{}")}


def _delta(kind: BlockKind, text: str) -> dict[str, Any]:
    match kind:
        case BlockKind.THOUGHT:
            return {"type": "thinking_delta", "thinking": text}
        case BlockKind.TEXT:
            return {"type": "text_delta", "text": text}
    return {"type": "input_json_delta", "partial_json": text}


def _ending(answering: Answering) -> dict[str, Any]:
    stop = answering.generation.first.stop_reason
    if answering.made_calls:
        return {"stop_reason": "tool_use", "stop_sequence": None}
    if answering.was_cut:
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if isinstance(stop, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": stop}
    return {"stop_reason": "end_turn", "stop_sequence": None}


def _usage(answering: Answering) -> dict[str, Any]:
    """Tokens as Anthropic counts them: what was cached is no input again."""
    generation = answering.generation
    cached = generation.num_cached_tokens
    return {
        "input_tokens": len(generation.prompt_ids) - cached,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": generation.first.num_tokens,
    }


def _thinking(thinking: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Whether the model is to think, for templates that ask; how long is up to it."""
    kind = None if thinking is None else thinking.get("type")
    return None if kind is None else {"enable_thinking": kind != "disabled"}


def _tools(tools: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    if not tools:
        return None
    found = []
    for i, tool in enumerate(tools):
        if tool.get("type", "custom") != "custom":
            raise RequestError(
                f"tools[{i}] has type {tool['type']!r}, which only Anthropic itself could run."
            )
        parts = {"name": tool.get("name"), "parameters": tool.get("input_schema")}
        if tool.get("description") is not None:
            parts["description"] = tool["description"]
        found.append({"type": "function", "function": parts})
    return found


def _choice(choice: Mapping[str, Any] | None) -> tuple[str | dict[str, Any] | None, bool | None]:
    """OpenAI's `tool_choice` and `parallel_tool_calls`."""
    if choice is None:
        return None, None
    parallel = False if choice.get("disable_parallel_tool_use") else None
    match choice.get("type"):
        case "auto" | "none" as kind:
            return kind, parallel
        case "any":
            return "required", parallel
        case "tool":
            return {"type": "function", "function": {"name": choice.get("name")}}, parallel
    raise RequestError(f"tool_choice.type must be auto, any, tool or none, got {choice.get('type')!r}.")


def _conversation(
    system: str | list[dict[str, Any]] | None, messages: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    found = [{"role": "system", "content": _plain(system, "system")}] if system else []
    for i, each in enumerate(messages):
        where, content = f"messages[{i}]", each.get("content")
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if not isinstance(blocks, list) or not all(isinstance(block, Mapping) for block in blocks):
            raise RequestError(f"{where}.content must be text or a list of blocks.")
        match each.get("role"):
            case "user":
                found += _of_user(blocks, where)
            case "assistant":
                found.append(_of_assistant(blocks, where))
            case "system":
                found.append({"role": "system", "content": _plain(blocks, where)})
            case role:
                raise RequestError(f"{where}.role must be user or assistant, got {role!r}.")
    return found


def _of_user(blocks: list[Any], where: str) -> Iterator[dict[str, Any]]:
    """Results of tools, each a message of its own, and what the user says."""
    said = []
    for block in blocks:
        if block.get("type") != "tool_result":
            said.append(block)
            continue
        text = _plain(block.get("content") or "", where)
        if block.get("is_error"):
            text = f"Error: {text}"
        yield {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": text}
    if said:
        yield {"role": "user", "content": _plain(said, where)}


def _of_assistant(blocks: list[Any], where: str) -> dict[str, Any]:
    text = [block for block in blocks if block.get("type") == "text"]
    thoughts = [block for block in blocks if block.get("type") in ("thinking", "redacted_thinking")]
    calls = [block for block in blocks if block.get("type") == "tool_use"]
    if len(text) + len(thoughts) + len(calls) < len(blocks):
        raise RequestError(f"{where} has a block that is neither text, thinking nor tool_use.")
    content = _plain(text, where) if text or not calls else None  # as OpenAI's clients say it
    said: dict[str, Any] = {"role": "assistant", "content": content}
    if thought := "\n".join(str(block.get("thinking", "")) for block in thoughts):
        said["reasoning_content"] = thought
    if calls:
        said["tool_calls"] = [_call(block) for block in calls]
    return said


def _call(block: Mapping[str, Any]) -> dict[str, Any]:
    function = {"name": block.get("name"), "arguments": json.dumps(block.get("input") or {})}
    return {"id": block.get("id"), "type": "function", "function": function}


def _plain(content: str | list[Any], where: str) -> str:
    """The text of blocks."""
    if isinstance(content, str):
        return content
    texts = [block.get("text") if isinstance(block, Mapping) else None for block in content]
    for block, text in zip(content, texts, strict=True):
        if not isinstance(text, str):
            kind = block.get("type") if isinstance(block, Mapping) else type(block).__name__
            raise RequestError(f"{where} has a block of type {kind!r}; models here read text only.")
    return "\n".join(map(str, texts))
