"""The replies of `/v1/responses`: the object, and the events by which it comes about.

Knows OpenAI's names for items and events, and blocks.
"""

from collections.abc import AsyncIterator, Iterator
from typing import Any
from uuid import uuid4

import msgspec

from kvspan.errors import KvspanError
from kvspan.server.blocks import Answering, Block, BlockKind, Change, Closed, Grown, Opened
from kvspan.server.responses import ResponsesRequest

_PREFIXES = {BlockKind.THOUGHT: "rs", BlockKind.TEXT: "msg", BlockKind.CALL: "fc"}
_DELTAS = {
    BlockKind.THOUGHT: "response.reasoning_text",
    BlockKind.TEXT: "response.output_text",
    BlockKind.CALL: "response.function_call_arguments",
}


class Response:
    """A response in the making.

    Args:
        answering: the conversation.
        body: of the request.
        model: the name that the reply carries.
        created_s: Unix time.
    """

    def __init__(
        self, answering: Answering, body: ResponsesRequest, *, model: str, created_s: int
    ) -> None:
        self._answering, self._body = answering, body
        self._model, self._created_s = model, created_s
        self._id = uuid4().hex
        self._next_event = 0

    def whole(self) -> dict[str, Any]:
        """The reply, once the answer is whole."""
        cut = self._answering.was_cut
        return {
            **self._head("incomplete" if cut else "completed"),
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": [self._item(block, done=True) for block in self._answering.blocks.whole],
            "usage": self._usage(),
        }

    async def events(self) -> AsyncIterator[bytes]:
        """The reply as events; what a step gave is one batch."""
        opening = self._opening()
        try:
            async for changes in self._answering.changes():
                batch = [each for change in changes for each in self._events(change)]
                if opening or batch:
                    yield opening + b"".join(batch)
                opening = b""
        except KvspanError as error:
            if opening:
                raise
            failure = {"code": "server_error", "message": str(error)}
            yield self._event("response.failed", response={**self._head("failed"), "error": failure})
            return
        whole = self.whole()
        yield self._event(f"response.{whole['status']}", response=whole)

    def _opening(self) -> bytes:
        begun = self._head("in_progress")
        return self._event("response.created", response=begun) + self._event(
            "response.in_progress", response=begun
        )

    def _events(self, change: Change) -> Iterator[bytes]:
        block = change.block
        where = {"item_id": self._item_id(block), "output_index": block.index}
        part = {} if block.kind is BlockKind.CALL else {"content_index": 0}
        name = _DELTAS[block.kind]
        logprobs: dict[str, Any] = {"logprobs": []} if block.kind is BlockKind.TEXT else {}
        match change:
            case Opened():
                item = self._item(block, done=False)
                yield self._event("response.output_item.added", output_index=block.index, item=item)
                if part:
                    empty = _part(block, "")
                    yield self._event("response.content_part.added", **where, **part, part=empty)
            case Grown(text=text):
                yield self._event(f"{name}.delta", **where, **part, delta=text, **logprobs)
            case Closed():
                key = "arguments" if block.kind is BlockKind.CALL else "text"
                named = {"name": block.name} if block.kind is BlockKind.CALL else {}
                yield self._event(
                    f"{name}.done", **where, **part, **named, **{key: block.text}, **logprobs
                )
                if part:
                    whole = _part(block, block.text)
                    yield self._event("response.content_part.done", **where, **part, part=whole)
                item = self._item(block, done=True)
                yield self._event("response.output_item.done", output_index=block.index, item=item)

    def _event(self, kind: str, **fields: Any) -> bytes:
        number, self._next_event = self._next_event, self._next_event + 1
        body = msgspec.json.encode({"type": kind, "sequence_number": number, **fields})
        return b"event: %s\ndata: %s\n\n" % (kind.encode(), body)

    def _item_id(self, block: Block) -> str:
        return f"{_PREFIXES[block.kind]}_{self._id}{block.index}"

    def _item(self, block: Block, *, done: bool) -> dict[str, Any]:
        status = "in_progress" if not done else "incomplete" if self._is_cut(block) else "completed"
        item = {"id": self._item_id(block), "status": status}
        content = [_part(block, block.text)] if done else []
        match block.kind:
            case BlockKind.THOUGHT:
                return {**item, "type": "reasoning", "summary": [], "content": content}
            case BlockKind.TEXT:
                return {**item, "type": "message", "role": "assistant", "content": content}
        call = {"type": "function_call", "call_id": block.call_id, "name": block.name}
        return {**item, **call, "arguments": block.text if done else ""}

    def _is_cut(self, block: Block) -> bool:
        """Whether the answer ended in it because there was no room for more."""
        return self._answering.was_cut and block is self._answering.blocks.whole[-1]

    def _head(self, status: str) -> dict[str, Any]:
        body = self._body
        return {
            "id": f"resp_{self._id}",
            "object": "response",
            "created_at": self._created_s,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": self._model,
            "output": [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": body.reasoning or {"effort": None, "summary": None},
            "store": False,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": body.text or {"format": {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": "disabled",
            "usage": None,
        }

    def _usage(self) -> dict[str, Any]:
        generation = self._answering.generation
        num_input, num_output = len(generation.prompt_ids), generation.first.num_tokens
        return {
            "input_tokens": num_input,
            "input_tokens_details": {"cached_tokens": generation.num_cached_tokens},
            "output_tokens": num_output,
            "output_tokens_details": {"reasoning_tokens": self._answering.num_reasoning_tokens},
            "total_tokens": num_input + num_output,
        }


def _part(block: Block, text: str) -> dict[str, Any]:
    if block.kind is BlockKind.THOUGHT:
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
