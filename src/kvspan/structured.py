"""What a text must look like, as users ask for it. Knows kinds and names; knows no grammar library."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from kvspan.errors import RequestError
from kvspan.unicode import check_unicode

KINDS = ("json", "regex", "choice", "grammar", "json_object")
"""Exactly one of them is asked for."""

MAX_SOURCE_BYTES = 1 << 20
"""Of a schema, an expression or a grammar: real ones are a hundredth of it."""


class StructuredOutputsParams(msgspec.Struct, frozen=True, kw_only=True):
    """A form that an output is held to; exactly one kind of it.

    Args:
        json: a JSON schema, as a mapping or as text. Text once the struct is made.
        regex: a regular expression that the whole output matches.
        choice: strings, of which the output is one.
        grammar: a context-free grammar in Lark's syntax, or in GBNF.
        json_object: true = any JSON object.
        disable_any_whitespace: JSON is written without line breaks and indentation.
        whitespace_pattern: an expression for the space between the parts of JSON instead of up to 40
            blanks; a small model that is left free may write space without end.
        after: the form holds only for what follows this text, which ends a thought.
        opening: with `after`: the thought may be left out, and begins with this text if it is not.
        lenient: what of a JSON schema cannot be held to is left out; else the schema is refused.

    Raises:
        RequestError: none or several kinds are asked for, or a value is of the wrong kind.
    """

    json: str | Mapping[str, Any] | bool | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    whitespace_pattern: str | None = None
    after: str | None = None
    opening: str | None = None
    lenient: bool = False

    def __post_init__(self) -> None:
        asked = [kind for kind in KINDS if getattr(self, kind) is not None]
        if self.json_object is False:
            asked.remove("json_object")
        if len(asked) != 1:
            raise RequestError(
                f"structured_outputs takes exactly one of {', '.join(KINDS)}; got {_listed(asked)}."
            )
        for name, rule in _RULES.items():
            msgspec.structs.force_setattr(self, name, rule(name, getattr(self, name)))
        if len(self.source.encode(errors="replace")) > MAX_SOURCE_BYTES:
            raise RequestError(f"structured_outputs.{self.kind} is over {MAX_SOURCE_BYTES} bytes.")

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> "StructuredOutputsParams":
        """The same from a JSON object.

        Raises:
            RequestError: it is none, or has an unknown name.
        """
        if not isinstance(mapping, Mapping):
            raise RequestError(f"structured_outputs must be an object, got {type(mapping).__name__}.")
        known = {k: v for k, v in mapping.items() if k not in _IGNORED and v is not None}
        for name in known:
            if name not in _RULES or name in _OURS:
                instead = _USE_INSTEAD.get(name, f"there are {', '.join(KINDS)}")
                raise RequestError(f"structured_outputs has no {name!r} here: {instead}.")
        return cls(**known)

    @property
    def kind(self) -> str:
        """Which of `KINDS`."""
        return next(kind for kind in KINDS if getattr(self, kind) is not None)

    @property
    def source(self) -> str:
        """The schema, expression or grammar as text; a JSON list of the choices."""
        value = getattr(self, self.kind)
        return value if isinstance(value, str) else json.dumps(value)


_IGNORED = ("disable_fallback", "backend", "disable_additional_properties")
"""Names that clients of vLLM send, and that change nothing here: there is one library, and schemas mean
what JSON Schema says."""

_OURS = ("after", "opening", "lenient")
"""Names that no client sends."""

_USE_INSTEAD = {"structural_tag": "use tools, or a grammar"}


def _json(name: str, value: Any) -> str | None:
    if value is None:
        return None
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"structured_outputs.{name} is no JSON: {error}.") from error
    if not isinstance(value, (Mapping, bool)):
        raise RequestError(
            f"structured_outputs.{name} must be a JSON schema, got {type(value).__name__}."
        )
    try:
        return json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"structured_outputs.{name} is no JSON schema: {error}.") from error


def _text(name: str, value: Any) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str) or not value:
        raise RequestError(f"structured_outputs.{name} must be text, got {value!r}.")
    return check_unicode(f"structured_outputs.{name}", value)


def _choice(name: str, value: Any) -> tuple[str, ...] | None:
    if value is None:
        return None
    if isinstance(value, str) or not isinstance(value, Sequence) or not value:
        raise RequestError(f"structured_outputs.{name} must be a list of strings, got {value!r}.")
    if empty := [each for each in value if not isinstance(each, str) or not each]:
        raise RequestError(
            f"structured_outputs.{name} must have strings that are not empty, got {empty[0]!r}."
        )
    return tuple(check_unicode(f"structured_outputs.{name}", each) for each in value)


def _true(name: str, value: Any) -> bool | None:
    if not isinstance(value, bool | None):
        raise RequestError(f"structured_outputs.{name} must be true or false, got {value!r}.")
    return value or None


def _flag(name: str, value: Any) -> bool:
    return _true(name, value) or False


_RULES = {
    "json": _json,
    "regex": _text,
    "choice": _choice,
    "grammar": _text,
    "json_object": _true,
    "disable_any_whitespace": _flag,
    "whitespace_pattern": _text,
    "after": _text,
    "opening": _text,
    "lenient": _flag,
}


def _listed(names: Sequence[str]) -> str:
    return " and ".join(names) or "none"
