"""What every route is given: the model, its names, and who may ask for it now."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from fastapi import Request

from kvspan.clock import unix_s
from kvspan.config.server import ServerConfig
from kvspan.engine.async_llm import AsyncLLM
from kvspan.errors import RequestError
from kvspan.loading.tokenizer import Tokenizer
from kvspan.server.errors import RefusedError
from kvspan.server.logprobs import TokenBytes
from kvspan.server.styles import Styles
from kvspan.server.writing import Writers

NOTE = "x-kvspan-note"
"""A header that says in a sentence what was not done as it was asked."""

_NOTE_CHARACTERS = 2000  # clients and proxies refuse heads of 8 KiB and more


@dataclass(slots=True, kw_only=True)
class Served:
    """A model that is served.

    Args:
        llm: it has been started.
        names: by which clients call the model; the first is the one that replies carry.
        config: of the server.
        styles: how the model writes its calls and its thoughts.
        tokenizer: the model's, with the chat template that the server writes by; None = it has none.
        writers: run its chat template.
        created_s: when it was started, in Unix time.
        draining: whether new requests are refused, since the server is about to end.
    """

    llm: AsyncLLM
    names: tuple[str, ...]
    config: ServerConfig
    styles: Styles
    tokenizer: Tokenizer | None
    writers: Writers = field(default_factory=Writers)
    created_s: int = field(default_factory=lambda: int(unix_s()))
    draining: bool = False

    def chat_tokenizer(self, template: str | None) -> Tokenizer:
        """What writes conversations, and cuts them into tokens.

        Args:
            template: a Jinja source that a request brings; None = the server's.

        Raises:
            RequestError: the model has none, or no templates are taken from requests.
        """
        if template is not None and not self.config.trust_request_chat_template:
            raise RequestError(
                "chat_template is a program, and this server runs none that requests bring: leave it "
                "out, or start the server with --trust-request-chat-template or --chat-template FILE.",
                param="chat_template",
            )
        tokenizer = self.tokenizer or self.llm.get_tokenizer()
        return tokenizer if template is None else tokenizer.with_chat_template(template)

    @property
    def default_sampling(self) -> Mapping[str, Any]:
        """Sampling parameters of the model's authors, for those that a request leaves out."""
        return self.llm.resolved.sampling_defaults

    @property
    def token_bytes(self) -> TokenBytes:
        """What tells the bytes of tokens; of a model without a tokenizer, none."""
        return self.llm.tokenizer or _NoBytes()

    def check_ids(self, ids: Sequence[int]) -> None:
        """Refuses token ids that the model has not.

        Raises:
            RequestError: names one.
        """
        size = self.llm.resolved.model_config.vocab_size
        if outside := [token_id for token_id in ids if not 0 <= token_id < size]:
            sentence = f"There is no token {outside[0]}: ids are 0 to {size - 1}."
            raise RequestError(sentence, param="tokens")

    def model_name(self, asked: str | None) -> str:
        """The model's name for a reply.

        Args:
            asked: the request's `model`.

        Raises:
            RefusedError: 404, it is not served here.
        """
        if asked is None:
            return self.names[0]
        if asked not in self.names:
            raise RefusedError(
                HTTPStatus.NOT_FOUND,
                f"The model {asked!r} is not served here; there is {', '.join(self.names)}.",
                param="model",
                code="model_not_found",
            )
        return asked

    def note_room(
        self, asked: tuple[str, int | None], num_prompt_tokens: int, notes: Sequence[str] = ()
    ) -> dict[str, str]:
        """Headers that say what is not done as it was asked, too many tokens first; none if all is.

        Args:
            asked: the field that bounds the output, and its value.
            num_prompt_tokens: of the longest prompt.
            notes: more sentences.
        """
        name, num_tokens = asked
        limit = self.llm.resolved.max_model_len
        room = limit - num_prompt_tokens
        if num_tokens is not None and num_tokens > room:
            cut = (
                f"{name} {num_tokens} was cut to {room}: --max-model-len is {limit}, and the prompt "
                f"has {num_prompt_tokens} tokens."
            )
            notes = (cut, *notes)
        return {NOTE: _in_header(" ".join(notes))} if notes else {}

    def admit(self, num_outputs: int) -> None:
        """Refuses requests for which there is no place.

        Args:
            num_outputs: that would be added.

        Raises:
            RefusedError: 503 while the server ends, 429 when too many wait, 400 for more than would ever
                find a place.
        """
        if self.draining:
            raise RefusedError(
                HTTPStatus.SERVICE_UNAVAILABLE,
                "The server is about to end and takes no more requests.",
                headers={"Retry-After": "5"},
            )
        places, queue = self.llm.num_places, self.config.max_queue
        if num_outputs > places + queue:
            raise RefusedError(
                HTTPStatus.BAD_REQUEST,
                f"The request asks for {num_outputs} outputs (n of each prompt), and there is room for "
                f"{places + queue}: {places} that run (--max-num-seqs) and {queue} that wait "
                "(--max-queue). Ask for fewer at a time.",
                param="n",
            )
        load = self.llm.health.load
        waiting = max(self.llm.num_unfinished - load.num_running, 0)
        room = queue + max(places - load.num_running, 0)
        if waiting + num_outputs > room:
            raise RefusedError(
                HTTPStatus.TOO_MANY_REQUESTS,
                f"The queue is full: {waiting} outputs wait, {num_outputs} more are asked for, and "
                f"--max-queue is {queue}. Try again later.",
                code="queue_full",
                headers={"Retry-After": str(self.retry_after_s)},
            )

    @property
    def retry_after_s(self) -> int:
        """Seconds in which a place may well be free."""
        return max(1, math.ceil(self.llm.num_unfinished / self.llm.num_places))


class _NoBytes:
    """Tokens of a model without a tokenizer."""

    def token_bytes(self, token_id: int) -> bytes:  # noqa: ARG002
        """Nothing."""
        return b""


def served(request: Request) -> Served:
    """What the application serves; for routes."""
    found: Served = request.app.state.served
    return found


def _in_header(text: str) -> str:
    """A text that may have come with a request, as headers bear it: ASCII on one line, not too long."""
    plain = "".join(c if " " <= c <= "~" else "?" for c in text)
    return plain if len(plain) <= _NOTE_CHARACTERS else f"{plain[: _NOTE_CHARACTERS - 3]}..."


def all_names(model: str, more: Iterable[str]) -> tuple[str, ...]:
    """The names of a model, without repetitions: those that were given, and its own."""
    return tuple(dict.fromkeys([*more, model]))
