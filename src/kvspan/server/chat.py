"""Answers in the making: from the pieces of an engine's outputs to messages, whole or in chunks.

Both ways go through the same parser, so that a stream adds up to what one reply says. Knows no HTTP.
"""

from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field

from msgspec import UNSET

from kvspan.engine.generation import Generation, Piece
from kvspan.engine.stream import RequestStream
from kvspan.engine.text import OutputText
from kvspan.server.logprobs import TokenNames, chat_logprobs, prompt_logprobs
from kvspan.server.parsing import Addition, AnswerParser, ParserFactory
from kvspan.server.protocol import ChatRequest
from kvspan.server.replies import (
    CachedTokens,
    ChatChoice,
    ChatLogprobs,
    ChatMessage,
    ChatReply,
    OutputDetails,
    ToolCall,
    ToolFunction,
    Usage,
)
from kvspan.server.sse import DONE, event


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What does not change while a conversation is answered.

    Args:
        request: the client's.
        reply_id: of all chunks.
        model: the name that replies carry.
        created_s: Unix time.
        names: how tokens are called.
        parsers: makes the parser of each output.
    """

    request: ChatRequest
    reply_id: str
    model: str
    created_s: int
    names: TokenNames
    parsers: ParserFactory


class Answer:
    """One of the n answers as it grows.

    Args:
        output: of the engine.
        asked: the conversation's frame.
    """

    def __init__(self, output: OutputText, asked: Asked) -> None:
        self.output = output
        self._asked = asked
        self._parser: AnswerParser = asked.parsers()
        self._num_logprobs = 0

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens of reasoning so far."""
        return self._parser.num_reasoning_tokens

    @property
    def finish_reason(self) -> str | None:
        """Why it ended, in OpenAI's words; None = it goes on."""
        reason = self.output.end_told
        if reason == "stop" and self._parser.made_calls:
            return "tool_calls"
        return None if reason is None else str(reason)

    def push(self, pieces: Sequence[Piece]) -> list[Addition]:
        """What further pieces of the output add to the message."""
        text = "".join(piece.text for piece in pieces)
        token_ids = [piece.token_id for piece in pieces if piece.token_id is not None]
        additions = list(self._parser.push(text, token_ids))
        if self.output.end_told is not None:
            additions += self._parser.finish()
        return additions

    def logprobs(self, token_ids: Sequence[int]) -> ChatLogprobs | None:
        """Of the next tokens, if they were asked for."""
        if not self._asked.request.logprobs:
            return None
        start, self._num_logprobs = self._num_logprobs, self._num_logprobs + len(token_ids)
        entries = self.output.logprobs[start : self._num_logprobs]
        num_top = self._asked.request.top_logprobs or 0
        return chat_logprobs(token_ids, entries, self._asked.names, num_top=num_top)


async def whole_answer(stream: RequestStream, asked: Asked) -> ChatReply:
    """All answers in one reply.

    Args:
        stream: of the request.
        asked: the conversation's frame.
    """
    answers = [Answer(output, asked) for output in stream.generation.outputs.values()]
    messages = [_Message() for _ in answers]
    async for pieces in stream:
        for index, own in _by_index(pieces).items():
            for addition in answers[index].push(own):
                messages[index].add(addition)
    generation = stream.generation
    want_ids = bool(asked.request.return_token_ids)
    return ChatReply(
        id=asked.reply_id,
        object="chat.completion",
        created=asked.created_s,
        model=asked.model,
        choices=[
            _whole_choice(answer, message, want_ids=want_ids)
            for answer, message in zip(answers, messages, strict=True)
        ],
        usage=usage(generation, answers),
        prompt_logprobs=prompt_logprobs(generation.prompt_logprobs, asked.names)
        if asked.request.prompt_logprobs is not None
        else UNSET,
        prompt_token_ids=list(generation.prompt_ids) if want_ids else UNSET,
    )


async def answer_chunks(stream: RequestStream, asked: Asked) -> AsyncIterator[bytes]:
    """The answers in chunks; what a step gave is one batch of events.

    Args:
        stream: of the request.
        asked: the conversation's frame.
    """
    answers = [Answer(output, asked) for output in stream.generation.outputs.values()]
    chunks = _Chunks(asked, stream.generation, answers)
    async for pieces in stream:
        if batch := b"".join(chunks.of(pieces)):
            yield batch
    yield b"".join(chunks.end())


class _Chunks:
    """Writes chunks of one reply."""

    def __init__(self, asked: Asked, generation: Generation, answers: Sequence[Answer]) -> None:
        self._asked, self._generation, self._answers = asked, generation, answers
        options = asked.request.stream_options
        self._last_usage = options is not None and options.include_usage
        self._all_usage = options is not None and options.continuous_usage_stats
        self._opened: set[int] = set()

    def of(self, pieces: Sequence[Piece]) -> Iterator[bytes]:
        for index, own in _by_index(pieces).items():
            token_ids = [piece.token_id for piece in own if piece.token_id is not None]
            if token_ids:
                yield from self._answer(self._answers[index], index, own, token_ids)

    def end(self) -> Iterator[bytes]:
        if self._last_usage:
            yield event(self._reply([], usage(self._generation, self._answers)))
        yield DONE

    def _answer(
        self, answer: Answer, index: int, pieces: Sequence[Piece], token_ids: Sequence[int]
    ) -> Iterator[bytes]:
        if index not in self._opened:
            self._opened.add(index)
            yield self._chunk(ChatChoice(index=index, delta=ChatMessage(role="assistant", content="")))
        logprobs = answer.logprobs(token_ids)
        want_ids = bool(self._asked.request.return_token_ids)
        deltas = [_delta(addition) for addition in answer.push(pieces)]
        if not deltas and (logprobs is not None or want_ids):
            deltas = [ChatMessage(content="")]  # what tokens say is told though their text waits
        for place, delta in enumerate(deltas):
            yield self._chunk(
                ChatChoice(
                    index=index,
                    delta=delta,
                    logprobs=logprobs if place == 0 else None,
                    token_ids=list(token_ids) if want_ids and place == 0 else UNSET,
                )
            )
        if (reason := answer.finish_reason) is not None:
            yield self._chunk(
                ChatChoice(
                    index=index,
                    delta=ChatMessage(),
                    finish_reason=reason,
                    stop_reason=answer.output.stop_reason,
                )
            )

    def _chunk(self, choice: ChatChoice) -> bytes:
        if self._all_usage:
            return event(self._reply([choice], usage(self._generation, self._answers)))
        return event(self._reply([choice], None))

    def _reply(self, choices: list[ChatChoice], used: Usage | None) -> ChatReply:
        return ChatReply(
            id=self._asked.reply_id,
            object="chat.completion.chunk",
            created=self._asked.created_s,
            model=self._asked.model,
            choices=choices,
            usage=UNSET if used is None and not self._last_usage else used,
        )


@dataclass(slots=True)
class _Message:
    """A message that additions add up to."""

    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)

    def add(self, addition: Addition) -> None:
        if addition.content:
            self.content.append(addition.content)
        if addition.reasoning:
            self.reasoning.append(addition.reasoning)
        for part in addition.tool_calls:
            self._add_call(part)

    def _add_call(self, part: ToolCall) -> None:
        place = len(self.calls) if part.index is UNSET else int(part.index)
        if place == len(self.calls):
            self.calls.append(ToolCall(id=part.id, type="function", function=part.function))
            return
        old, new = self.calls[place].function, part.function
        joined = _joined(old.arguments) + _joined(new.arguments)
        name = old.name if new.name is UNSET else new.name
        call = ToolCall(
            id=self.calls[place].id,
            type="function",
            function=ToolFunction(name=name, arguments=joined),
        )
        self.calls[place] = call

    def message(self) -> ChatMessage:
        text = "".join(self.content)
        return ChatMessage(
            role="assistant",
            content=text if text or not self.calls else None,
            reasoning_content="".join(self.reasoning) if self.reasoning else UNSET,
            refusal=None,
            tool_calls=self.calls or UNSET,
        )


def usage(generation: Generation, answers: Sequence[Answer]) -> Usage:
    """Tokens of a conversation so far.

    Args:
        generation: the request.
        answers: its outputs.
    """
    prompt = len(generation.prompt_ids)
    output = sum(answer.output.num_tokens for answer in answers)
    reasoning = sum(answer.num_reasoning_tokens for answer in answers)
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=output,
        total_tokens=prompt + output,
        prompt_tokens_details=CachedTokens(generation.num_cached_tokens),
        completion_tokens_details=OutputDetails(reasoning) if reasoning else UNSET,
    )


def _whole_choice(answer: Answer, message: _Message, *, want_ids: bool) -> ChatChoice:
    token_ids = answer.output.token_ids
    return ChatChoice(
        index=answer.output.index,
        message=message.message(),
        logprobs=answer.logprobs(token_ids),
        finish_reason=answer.finish_reason,
        stop_reason=answer.output.stop_reason,
        token_ids=list(token_ids) if want_ids else UNSET,
    )


def _by_index(pieces: Sequence[Piece]) -> dict[int, list[Piece]]:
    found: dict[int, list[Piece]] = {}
    for piece in pieces:
        found.setdefault(piece.index, []).append(piece)
    return found


def _delta(addition: Addition) -> ChatMessage:
    return ChatMessage(
        content=addition.content or UNSET,
        reasoning_content=addition.reasoning or UNSET,
        tool_calls=list(addition.tool_calls) or UNSET,
    )


def _joined(part: object) -> str:
    return part if isinstance(part, str) else ""
