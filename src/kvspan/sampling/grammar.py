"""Grammars: which tokens may come next in an output that is held to a form.

A grammar's state advances where requests are decided on, one accepted token at a time; a worker gets a
bit for each token of the vocabulary. Knows tokens and forms. Knows no tensors, ranks or scheduler, and
its library (llguidance) needs no torch.
"""

import contextlib
import json
import re
import threading
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from kvspan.config.model import ModelConfig
from kvspan.errors import RequestError
from kvspan.structured import StructuredOutputsParams

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_KEPT = 64
"""Forms kept ready for the next request of the same: agents send one schema with every call."""

_MARK = "<non-verbose/>"  # what the library puts in place of its state

WHITESPACE = r"[ \t\r\n]{1,40}"
"""Between the parts of JSON: a line break and twenty levels of indentation, but not space for ever."""


class Grammar:
    """The state of one output.

    Args:
        matcher: of the library, at its beginning.
        vocab_size: tokens that have a logit.
    """

    def __init__(self, matcher: "LLMatcher", vocab_size: int) -> None:
        self._matcher = matcher
        self._num_bytes = -(-vocab_size // 8)

    @property
    def ended(self) -> bool:
        """Whether the output is whole: nothing can follow."""
        return self._matcher.is_stopped()

    @property
    def failure(self) -> str | None:
        """A sentence, if the form can no longer be held to; None = it can."""
        return _sentence(self._matcher.get_error()) if self._matcher.is_error() else None

    def mask(self) -> bytes:
        """Which tokens may come next.

        Returns:
            A bit for each token of the vocabulary, the lowest bit of a byte first.
        """
        return self._matcher.compute_bitmask()[: self._num_bytes].ljust(self._num_bytes, b"\0")

    def accept(self, token_id: int) -> None:
        """Goes on by a token; after one that may not come, `failure` says so."""
        self._matcher.consume_token(token_id)


class Grammars:
    """Makes grammars for a model's tokens. Threads may share it.

    Args:
        tokenizer_json: gives the model's tokenizer as `tokenizers` writes it, when the first form
            comes; None = it has none.
        vocab_size: tokens that have a logit.
        eos_token_ids: tokens that end a text.
    """

    def __init__(
        self, tokenizer_json: Callable[[], str] | None, *, vocab_size: int, eos_token_ids: Sequence[int]
    ) -> None:
        self._tokenizer_json = tokenizer_json
        self._vocab_size, self._eos_token_ids = vocab_size, list(eos_token_ids)
        self._tokens: LLTokenizer | None = None
        self._ready: dict[StructuredOutputsParams, LLMatcher] = {}
        self._lock = threading.Lock()

    @classmethod
    def of_model(cls, config: ModelConfig, tokenizer_json: Callable[[], str] | None) -> "Grammars":
        """The same with the sizes of a model's config."""
        return cls(tokenizer_json, vocab_size=config.vocab_size, eos_token_ids=config.eos_token_ids)

    def warm(self) -> None:
        """Gets ready for the first form: some tenths of a second, which a request need not wait for."""
        if self._tokenizer_json is not None:
            with contextlib.suppress(RequestError), self._lock:  # whoever asks will be told
                self._vocabulary()

    def start(self, asked: StructuredOutputsParams) -> Grammar:
        """A grammar at its beginning.

        Args:
            asked: the form.

        Raises:
            RequestError: it is none, or one that the library cannot hold to; says why.
        """
        return Grammar(self._matcher(asked).deep_copy(), self._vocab_size)

    def check(self, asked: StructuredOutputsParams) -> None:
        """Refuses a form that `start` would refuse."""
        self._matcher(asked)

    def _matcher(self, asked: StructuredOutputsParams) -> "LLMatcher":
        from llguidance import LLMatcher, LLParserLimits

        with self._lock:
            if asked in self._ready:
                return self._ready[asked]
            limits = LLParserLimits(verbose_errors=False)
            matcher = LLMatcher(self._vocabulary(), compiled(asked), log_level=0, limits=limits)
            if matcher.is_error():
                raise RequestError(
                    f"The {_called(asked)} that the output is to fit cannot be used: "
                    f"{_sentence(matcher.get_error())}"
                )
            beginning = matcher.deep_copy()
            beginning.compute_bitmask()
            if beginning.is_error():
                raise RequestError(
                    f"The {_called(asked)} that the output is to fit cannot be used: no text fits it."
                )
            while len(self._ready) >= MAX_KEPT:
                del self._ready[next(iter(self._ready))]
            self._ready[asked] = matcher
            return matcher

    def _vocabulary(self) -> "LLTokenizer":
        """The library's view of the tokens."""
        from llguidance import LLTokenizer

        if self._tokenizer_json is None:
            raise RequestError("Structured output needs a tokenizer, and this model has none.")
        if self._tokens is None:
            try:
                self._tokens = LLTokenizer(
                    self._tokenizer_json(),
                    n_vocab=self._vocab_size,
                    eos_token=self._eos_token_ids or None,
                )
            except ValueError as error:
                raise RequestError(
                    f"There is no structured output with this tokenizer: {error}."
                ) from error
        return self._tokens


def compiled(asked: StructuredOutputsParams) -> str:
    """A form in the library's own format.

    Args:
        asked: the form.

    Raises:
        RequestError: a grammar's syntax is neither Lark's nor GBNF's.
    """
    form = _form(asked)
    if asked.after is None:
        return json.dumps({"grammars": [form]})
    closing = json.dumps(asked.after, ensure_ascii=False)
    thinking = f"thought[suffix={closing}]: /(?s:.*)/\nstart: thought /\\n*/ @form"
    if asked.opening is not None:
        opening = json.dumps(asked.opening, ensure_ascii=False)
        thinking = f"thought[suffix={closing}]: /(?s:.*)/\nstart: @form | {opening} thought /\\n*/ @form"
    return json.dumps({"grammars": [{"lark_grammar": thinking}, {"name": "form", **form}]})


@lru_cache(MAX_KEPT)
def left_out(asked: StructuredOutputsParams) -> tuple[str, ...]:
    """What of the JSON schemas of a form an output is not held to; needs no tokens.

    Args:
        asked: a form; of one that `Grammars.check` refuses there is nothing to say.

    Returns:
        Keywords, e.g. `uniqueItems`, or `format colour`.

    Raises:
        RequestError: a grammar's syntax is neither Lark's nor GBNF's.
    """
    from llguidance import LLMatcher

    is_refused, warnings = LLMatcher.validate_grammar_with_warnings(compiled(asked))
    if is_refused:
        return ()
    return tuple(dict.fromkeys(name for warning in warnings for name in _keywords(warning)))


def _keywords(warning: str) -> list[str]:
    """The keywords that a warning of the library is about, or else the warning."""
    name, _, rest = _COUNT.sub("", warning).partition(": ")
    match name:
        case "Unimplemented keys":
            return re.findall(r'"([^"]+)"', rest)
        case "Unknown format":
            return [f"format {rest}"]
    return ["oneOf (as anyOf)"] if name.startswith("oneOf") else [warning.rstrip(".")]


_COUNT = re.compile(r" \(\d+ times\)$")
"""What the library adds to a warning that it has more than once."""


def _form(asked: StructuredOutputsParams) -> dict[str, Any]:
    from llguidance.gbnf_to_lark import any_to_lark

    match asked.kind:
        case "json":
            return {"json_schema": _with_layout(json.loads(asked.source), asked)}
        case "json_object":
            return {"json_schema": _with_layout({"type": "object"}, asked)}
        case "regex":
            return {"lark_grammar": f"start: {_as_lark_regex(asked.source)}"}
        case "choice":
            choices = (json.dumps(each, ensure_ascii=False) for each in json.loads(asked.source))
            return {"lark_grammar": f"start: {' | '.join(choices)}"}
    try:
        return {"lark_grammar": any_to_lark(asked.source)}
    except Exception as error:  # the library raises no narrower one
        raise RequestError(f"The grammar that the output is to fit is none: {error}.") from error


def _with_layout(schema: Any, asked: StructuredOutputsParams) -> dict[str, Any]:
    """A schema that says how much space may be between its parts, unless it does so itself."""
    if asked.disable_any_whitespace:
        layout: dict[str, Any] = {"whitespace_flexible": False}
    else:
        layout = {"whitespace_pattern": asked.whitespace_pattern or WHITESPACE}
    layout["lenient"] = asked.lenient
    if isinstance(schema, bool):
        return {"x-guidance": layout} if schema else {"not": {}, "x-guidance": layout}
    return {"x-guidance": layout, **schema}


def _as_lark_regex(regex: str) -> str:
    """An expression as Lark writes it; it holds for the whole text anyway, so anchors say nothing."""
    from llguidance import regex_to_lark

    inner = regex.removeprefix("^")
    if inner.endswith("$") and not inner.endswith("\\$"):
        inner = inner[:-1]
    return f"/{regex_to_lark(inner, 'd')}/"  # \d is 0-9, as nobody expects more


def _called(asked: StructuredOutputsParams) -> str:
    """What a form is called, by whichever field it came."""
    return "JSON schema" if asked.kind == "json" else asked.kind


def _sentence(error: str) -> str:
    """The library's complaint as one line that ends with a full stop."""
    return " ".join(error.replace(_MARK, "").split()).rstrip(".") + "."
