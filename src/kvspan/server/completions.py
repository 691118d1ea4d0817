"""Completions in the making: from the pieces of an engine's outputs to texts, whole or in chunks.

Knows no HTTP.
"""

from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass

from msgspec import UNSET

from kvspan.engine.generation import Piece
from kvspan.engine.stream import RequestStream, together
from kvspan.engine.text import OutputText
from kvspan.server.logprobs import Entry, TokenNames, completion_logprobs, prompt_logprobs
from kvspan.server.protocol import CompletionRequest
from kvspan.server.replies import (
    CachedTokens,
    CompletionChoice,
    CompletionLogprobs,
    CompletionReply,
    Usage,
)
from kvspan.server.sse import DONE, event


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What does not change while prompts are completed.

    Args:
        request: the client's.
        reply_id: of all chunks.
        model: the name that replies carry.
        created_s: Unix time.
        names: how tokens are called.
        prompts: text of each prompt, for `echo`.
    """

    request: CompletionRequest
    reply_id: str
    model: str
    created_s: int
    names: TokenNames
    prompts: tuple[str, ...]

    @property
    def echo(self) -> bool:
        """Whether a text begins with its prompt."""
        return bool(self.request.echo)

    @property
    def no_output(self) -> bool:
        """Whether only the prompt is asked for: the one token that comes is thrown away."""
        return self.request.max_tokens == 0


class Text:
    """One text as it grows.

    Args:
        stream: of its request.
        output: of the engine.
        prompt: text of the prompt.
        index: among all texts of the reply.
        asked: the frame.
    """

    def __init__(
        self, stream: RequestStream, output: OutputText, prompt: str, index: int, asked: Asked
    ) -> None:
        self.output, self.index = output, index
        self._generation, self._prompt, self._asked = stream.generation, prompt, asked
        self._num_told = 0  # tokens of the output
        self._length = 0  # characters
        self._opened = False

    @property
    def num_tokens(self) -> int:
        """Tokens of output so far."""
        return 0 if self._asked.no_output else self.output.num_tokens

    def choice(self, text: str) -> CompletionChoice:
        """What was added since the last call.

        Args:
            text: of the output; the prompt's comes before it the first time, if it is to be echoed.
        """
        first, self._opened = not self._opened, True
        token_ids = list(self.output.token_ids[self._num_told :])
        entries = list(self.output.logprobs[self._num_told :])
        self._num_told += len(token_ids)
        text = "" if self._asked.no_output else text
        token_ids, entries = ([], []) if self._asked.no_output else (token_ids, entries)
        echoed = first and self._asked.echo
        logprobs = self._logprobs(token_ids, entries, with_prompt=echoed)
        text = self._prompt + text if echoed else text
        self._length += len(text)
        reason = self.output.end_told
        if self._asked.no_output and reason is not None:
            reason = type(reason).LENGTH
        want_ids = bool(self._asked.request.return_token_ids)
        want_prompt = self._asked.request.prompt_logprobs is not None and first
        return CompletionChoice(
            index=self.index,
            text=text,
            logprobs=logprobs,
            finish_reason=None if reason is None else str(reason),
            stop_reason=self.output.stop_reason,
            token_ids=token_ids if want_ids else UNSET,
            prompt_token_ids=list(self._generation.prompt_ids) if want_ids and first else UNSET,
            prompt_logprobs=prompt_logprobs(self._generation.prompt_logprobs, self._asked.names)
            if want_prompt
            else UNSET,
        )

    def _logprobs(
        self, token_ids: Sequence[int], entries: Sequence[Entry], *, with_prompt: bool
    ) -> CompletionLogprobs | None:
        if self._asked.request.logprobs is None:
            return None
        prompt = self._generation if with_prompt else None
        return completion_logprobs(
            [*(prompt.prompt_ids if prompt else ()), *token_ids],
            [*(prompt.prompt_logprobs if prompt else ()), *entries],
            self._asked.names,
            offset=self._length,
        )


async def whole_texts(streams: Sequence[RequestStream], asked: Asked) -> CompletionReply:
    """All texts in one reply.

    Args:
        streams: one for each prompt.
        asked: the frame.
    """
    texts = _texts(streams, asked)
    pieces: list[list[str]] = [[] for _ in texts]
    n = len(texts) // len(streams)
    async for found in together(streams):
        for place, piece in found:
            pieces[place * n + piece.index].append(piece.text)
    return CompletionReply(
        id=asked.reply_id,
        object="text_completion",
        created=asked.created_s,
        model=asked.model,
        choices=[text.choice("".join(own)) for text, own in zip(texts, pieces, strict=True)],
        usage=_usage(streams, texts),
    )


async def text_chunks(streams: Sequence[RequestStream], asked: Asked) -> AsyncIterator[bytes]:
    """The texts in chunks; what a step gave is one batch of events.

    Args:
        streams: one for each prompt.
        asked: the frame.
    """
    texts = _texts(streams, asked)
    options = asked.request.stream_options
    last_usage = options is not None and options.include_usage
    all_usage = options is not None and options.continuous_usage_stats

    def reply(choices: list[CompletionChoice], *, used: bool) -> bytes:
        return event(
            CompletionReply(
                id=asked.reply_id,
                object="text_completion",
                created=asked.created_s,
                model=asked.model,
                choices=choices,
                usage=_usage(streams, texts) if used else None if last_usage else UNSET,
            )
        )

    async for found in together(streams):
        choices = _choices(found, texts, len(texts) // len(streams), asked)
        if batch := b"".join(reply([choice], used=all_usage) for choice in choices):
            yield batch
    yield (reply([], used=True) if last_usage else b"") + DONE


def _choices(
    found: Sequence[tuple[int, Piece]], texts: Sequence[Text], n: int, asked: Asked
) -> Iterator[CompletionChoice]:
    """What the pieces of a step add to each text; nothing for one whose text waits."""
    by_text: dict[int, list[Piece]] = {}
    for place, piece in found:
        if piece.token_id is not None:
            by_text.setdefault(place * n + piece.index, []).append(piece)
    wordy = asked.request.logprobs is not None or bool(asked.request.return_token_ids)
    for index, pieces in by_text.items():
        choice = texts[index].choice("".join(piece.text for piece in pieces))
        if choice.text or choice.finish_reason is not None or wordy:
            yield choice


def _texts(streams: Sequence[RequestStream], asked: Asked) -> list[Text]:
    pairs = [
        (stream, output, prompt)
        for stream, prompt in zip(streams, asked.prompts, strict=True)
        for output in stream.generation.outputs.values()
    ]
    return [
        Text(stream, output, prompt, index, asked)
        for index, (stream, output, prompt) in enumerate(pairs)
    ]


def _usage(streams: Sequence[RequestStream], texts: Sequence[Text]) -> Usage:
    prompt = sum(len(stream.generation.prompt_ids) for stream in streams)
    output = sum(text.num_tokens for text in texts)
    cached = sum(stream.generation.num_cached_tokens for stream in streams)
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=output,
        total_tokens=prompt + output,
        prompt_tokens_details=CachedTokens(cached),
    )
