"""Log-probabilities as OpenAI's clients read them: strict JSON, exact bytes. Knows a tokenizer."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from kvspan.request import Logprob
from kvspan.server.replies import (
    ChatLogprobs,
    CompletionLogprobs,
    TokenChoice,
    TokenLogprobs,
)

LEAST_LOGPROB = -9999.0
"""Stands for -inf, which JSON has not; vLLM's and OpenAI's value."""

Entry = Mapping[int, Logprob]
"""Token id -> log-probability at one position: the token there first, then the most probable ones."""


class TokenBytes(Protocol):
    """A tokenizer, as far as tokens are bytes."""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for, which may be a part of a character."""
        ...


class TokenNames:
    """How tokens are called in replies.

    Args:
        tokenizer: of the model.
        as_ids: `token_id:7` and not the text, as clients ask that cannot bear two names alike.
    """

    def __init__(self, tokenizer: TokenBytes, *, as_ids: bool = False) -> None:
        self._tokenizer, self._as_ids = tokenizer, as_ids

    def bytes_of(self, token_id: int) -> bytes:
        """A token's bytes."""
        return self._tokenizer.token_bytes(token_id)

    def name(self, token_id: int) -> str:
        """A token's text; a part of a character as OpenAI spells it, `\\xe2\\x80`."""
        if self._as_ids:
            return f"token_id:{token_id}"
        raw = self.bytes_of(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "".join(f"\\x{byte:02x}" for byte in raw)


def finite(logprob: float) -> float:
    """A log-probability that JSON can say."""
    return max(logprob, LEAST_LOGPROB)


def chat_logprobs(
    token_ids: Sequence[int], entries: Sequence[Entry], names: TokenNames, *, num_top: int
) -> ChatLogprobs:
    """Log-probabilities of an answer's tokens.

    Args:
        token_ids: of the answer.
        entries: one for each of them.
        names: how tokens are called.
        num_top: most probable tokens to list at each position.
    """
    return ChatLogprobs(
        [_position(t, e, names, num_top) for t, e in zip(token_ids, entries, strict=True)]
    )


def _position(token_id: int, entry: Entry, names: TokenNames, num_top: int) -> TokenLogprobs:
    best = sorted(entry.items(), key=lambda each: each[1].rank)[:num_top]
    return TokenLogprobs(
        token=names.name(token_id),
        logprob=finite(entry[token_id].logprob),
        bytes=list(names.bytes_of(token_id)),
        top_logprobs=[
            TokenChoice(token=names.name(t), logprob=finite(e.logprob), bytes=list(names.bytes_of(t)))
            for t, e in best
        ],
    )


def completion_logprobs(
    token_ids: Sequence[int], entries: Sequence[Entry | None], names: TokenNames, *, offset: int
) -> CompletionLogprobs:
    """Log-probabilities of a text's tokens.

    Args:
        token_ids: of the text.
        entries: one for each of them; None for the first of a prompt, which nothing predicts.
        names: how tokens are called.
        offset: characters of the text before them.
    """
    spelled = [names.name(token_id) for token_id in token_ids]
    offsets = [offset]
    for name in spelled[:-1]:
        offsets.append(offsets[-1] + len(name))
    pairs = list(zip(token_ids, entries, strict=True))
    return CompletionLogprobs(
        text_offset=offsets[: len(spelled)],
        tokens=spelled,
        token_logprobs=[None if e is None else finite(e[t].logprob) for t, e in pairs],
        top_logprobs=[None if e is None else _by_name(e, names) for _, e in pairs],
    )


def _by_name(entry: Entry, names: TokenNames) -> dict[str, float]:
    return {names.name(t): finite(e.logprob) for t, e in entry.items()}


def prompt_logprobs(
    entries: Sequence[Entry | None], names: TokenNames
) -> list[dict[str, dict[str, float | int | str]] | None]:
    """Log-probabilities of a prompt's tokens, as vLLM spells them.

    Args:
        entries: one for each token; None for the first.
        names: how tokens are called.
    """
    return [
        None
        if entry is None
        else {
            str(t): {"logprob": finite(e.logprob), "rank": e.rank, "decoded_token": names.name(t)}
            for t, e in entry.items()
        }
        for entry in entries
    ]
