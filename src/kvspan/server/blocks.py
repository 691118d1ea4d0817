"""An answer as blocks that follow one another: thoughts, text, calls. What the newer APIs speak of.

Knows additions. Knows neither OpenAI's nor Anthropic's names for any of it.
"""

from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TypeAlias

from kvspan.engine.generation import Generation
from kvspan.engine.stream import RequestStream
from kvspan.request import FinishReason
from kvspan.server.conversation import prepare
from kvspan.server.parsing import Addition, AnswerParser
from kvspan.server.protocol import ChatRequest
from kvspan.server.replies import ToolCall
from kvspan.server.served import Served


class BlockKind(Enum):
    """What a block is."""

    THOUGHT = auto()
    TEXT = auto()
    CALL = auto()


@dataclass(slots=True)
class Block:
    """A part of an answer.

    Args:
        kind: what it is.
        index: 0.. in the answer.
        call_id: of a call.
        name: of the function that is called.
        text: so far; of a call, its arguments.
    """

    kind: BlockKind
    index: int
    call_id: str = ""
    name: str = ""
    text: str = ""


@dataclass(frozen=True, slots=True)
class Opened:
    """A block begins."""

    block: Block


@dataclass(frozen=True, slots=True)
class Grown:
    """A block gets more text."""

    block: Block
    text: str


@dataclass(frozen=True, slots=True)
class Closed:
    """A block is whole."""

    block: Block


Change: TypeAlias = Opened | Grown | Closed


@dataclass(slots=True)
class Blocks:
    """Additions -> blocks; one is open at a time."""

    whole: list[Block] = field(default_factory=list)
    _open: Block | None = None

    def push(self, additions: Iterable[Addition]) -> Iterator[Change]:
        """What further additions change."""
        for addition in additions:
            if addition.reasoning:
                yield from self._grow(BlockKind.THOUGHT, addition.reasoning)
            if addition.content:
                yield from self._grow(BlockKind.TEXT, addition.content)
            for part in addition.tool_calls:
                yield from self._call(part)

    def end(self) -> Iterator[Change]:
        """Closes the last block."""
        if self._open is not None:
            self.whole.append(self._open)
            yield Closed(self._open)
            self._open = None

    def _grow(self, kind: BlockKind, text: str) -> Iterator[Change]:
        if self._open is None or self._open.kind is not kind:
            yield from self._begin(Block(kind, len(self.whole) + (self._open is not None)))
        assert self._open is not None, "it has just been opened"
        self._open.text += text
        yield Grown(self._open, text)

    def _call(self, part: ToolCall) -> Iterator[Change]:
        function = part.function
        if isinstance(function.name, str):
            index = len(self.whole) + (self._open is not None)
            yield from self._begin(Block(BlockKind.CALL, index, str(part.id), function.name))
        if isinstance(function.arguments, str) and function.arguments:
            yield from self._grow(BlockKind.CALL, function.arguments)

    def _begin(self, block: Block) -> Iterator[Change]:
        yield from self.end()
        self._open = block
        yield Opened(block)


class Answering:
    """A conversation that is being answered once.

    Args:
        stream: of the request.
        parser: of its output.
        notes: sentences on what is not done as it was asked.
    """

    def __init__(self, stream: RequestStream, parser: AnswerParser, notes: Sequence[str]) -> None:
        self.stream, self._parser, self.notes = stream, parser, notes
        self.blocks = Blocks()

    @classmethod
    async def begin(cls, here: Served, body: ChatRequest, headers: Mapping[str, str]) -> "Answering":
        """Queues a conversation.

        Args:
            here: what is served.
            body: the conversation, in the words of the chat route.
            headers: of the call, that say what trace it belongs to.

        Raises:
            RequestError: it is refused; says why.
            RefusedError: there is no place for it now.
        """
        conversation = await prepare(here, body)
        here.admit(1)
        stream = here.llm.add(
            {"prompt_token_ids": conversation.prompt_ids},
            conversation.params,
            priority=body.priority,
            cache_salt=body.cache_salt or "",
            trace_headers=headers,
        )
        return cls(stream, conversation.parser(), conversation.notes)

    @property
    def generation(self) -> Generation:
        """The request as far as it has come."""
        return self.stream.generation

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens of thought so far."""
        return self._parser.num_reasoning_tokens

    @property
    def was_cut(self) -> bool:
        """Whether the answer ended because there was no room for more."""
        return self.generation.first.finish_reason is FinishReason.LENGTH

    @property
    def made_calls(self) -> bool:
        """Whether the answer ends in calls."""
        return self._parser.made_calls and not self.was_cut

    async def changes(self) -> AsyncIterator[list[Change]]:
        """What each step changes."""
        output = self.generation.first
        async for pieces in self.stream:
            text = "".join(piece.text for piece in pieces)
            token_ids = [piece.token_id for piece in pieces if piece.token_id is not None]
            changes = list(self.blocks.push(self._parser.push(text, token_ids)))
            if output.end_told is not None:
                changes += self.blocks.push(self._parser.finish())
                changes += self.blocks.end()
            yield changes

    async def wait(self) -> list[Block]:
        """All blocks, when the answer is whole."""
        async for _ in self.changes():
            pass
        return self.blocks.whole
