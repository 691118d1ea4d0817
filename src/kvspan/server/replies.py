"""What the server answers: the bodies of OpenAI-compatible replies and of the chunks of streams.

`UNSET` leaves a field out, None writes null, as clients tell them apart. Knows no engine.
"""

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType


class CachedTokens(msgspec.Struct, frozen=True):
    """Of a prompt's tokens, those that were found in the cache."""

    cached_tokens: int


class OutputDetails(msgspec.Struct, frozen=True):
    """Of an output's tokens, those that are reasoning."""

    reasoning_tokens: int


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens that a request took."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: OutputDetails | UnsetType = UNSET


class TokenChoice(msgspec.Struct, frozen=True, kw_only=True):
    """A token that was chosen, or could have been."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """The token at a position, and the most probable ones there."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TokenChoice]


class ChatLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities of an answer."""

    content: list[TokenLogprobs]


class CompletionLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Log-probabilities of a text; the first token of a prompt has none."""

    text_offset: list[int]
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]


class ToolFunction(msgspec.Struct, frozen=True, kw_only=True):
    """A call, or the next part of its arguments."""

    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call that the model makes; in a stream, the next part of one."""

    function: ToolFunction
    index: int | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True):
    """An answer; in a stream, what is added to it."""

    role: str | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    reasoning_content: str | UnsetType | None = UNSET
    refusal: UnsetType | None = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One of the n answers."""

    index: int
    message: ChatMessage | UnsetType = UNSET
    delta: ChatMessage | UnsetType = UNSET
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatReply(msgspec.Struct, frozen=True, kw_only=True):
    """Answers to a conversation, or a chunk of them."""

    id: str
    object: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage | UnsetType | None = UNSET
    system_fingerprint: str | UnsetType = UNSET
    prompt_logprobs: list[Any] | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class CompletionChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One of the n texts of a prompt."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: list[Any] | UnsetType | None = UNSET


class CompletionReply(msgspec.Struct, frozen=True, kw_only=True):
    """Texts that complete prompts, or a chunk of them."""

    id: str
    object: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    system_fingerprint: str | UnsetType = UNSET
