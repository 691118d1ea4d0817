"""What a chat template shows a model, found out by having it write small conversations.

Knows OpenAI's names for tools and calls. Knows no Jinja, no tokens and no model.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, TypeAlias

from kvspan.errors import ModelError, RequestError

Message: TypeAlias = Mapping[str, Any]
Write: TypeAlias = Callable[[Sequence[Message], Sequence[Mapping[str, Any]]], str]
"""Messages and tools -> text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What a chat template shows the model of a conversation, and in what shape it wants to be given it.

    Args:
        shows_tools: the tools that the model may call.
        shows_calls: calls of earlier turns.
        takes_null: a turn that only calls has None for content; else an empty text.
        takes_objects: arguments of calls are objects; else they are JSON, as text.
        variables: names that it looks up.
    """

    shows_tools: bool
    shows_calls: bool
    takes_null: bool
    takes_objects: bool
    variables: frozenset[str]


def read_template(write: Write, variables: frozenset[str]) -> Reading:
    """Finds out what a chat template does with tools and calls.

    Where it refuses every conversation that it is tried with, it is thought to show all there is: what
    is wrong is said when it refuses a request.

    Args:
        write: runs the template; may raise RequestError and ModelError.
        variables: names that it looks up.
    """
    openings = ([_USER], [_SYSTEM, _USER])
    texts = [text for opening in openings if (text := _tried(write, opening)) is not None]
    shows_calls, takes_null, takes_objects = _read_calls(write)
    return Reading(
        shows_tools=not texts or any(_TOOL_NAME in text for text in texts),
        shows_calls=shows_calls,
        takes_null=takes_null,
        takes_objects=takes_objects,
        variables=variables,
    )


def _read_calls(write: Write) -> tuple[bool, bool, bool]:
    """Whether calls are shown, may have None for content, and may have objects for arguments."""
    blind: list[tuple[bool, bool]] = []
    for end, (null, objects) in product(([_RESULT], []), _SHAPES):
        text = _tried(write, [_USER, _calling(null=null, objects=objects), *end])
        if text is None or _SPELLED_BY_PYTHON in text:
            continue
        if null and _says_none(
            text, _tried(write, [_USER, _calling(null=False, objects=objects), *end])
        ):
            continue
        if _CALL_NAME in text:
            return True, null, objects
        blind.append((null, objects))
    return (False, *blind[0]) if blind else (True, False, True)


def _tried(write: Write, messages: Sequence[Message]) -> str | None:
    try:
        return write(messages, [_TOOL])
    except (RequestError, ModelError):
        return None


def _says_none(text: str, empty: str | None) -> bool:
    """Whether a content of None was written out; `empty` is the same conversation without content."""
    return text.count("None") > (empty or "").count("None")


_TOOL_NAME, _CALL_NAME = "kvspan_a_tool", "kvspan_a_call"
"""Two names, so that a call is not found in the list of tools."""

_SHAPES = ((True, True), (False, True), (True, False), (False, False))
"""Content None or empty, arguments as objects or as text: OpenAI's clients send the first, and it is the
last that a template can do nothing wrong with."""

_SPELLED_BY_PYTHON = "{'kvspan'"
"""What arguments look like that a template has not written as JSON."""

_SYSTEM = {"role": "system", "content": "Help."}
_USER = {"role": "user", "content": "Hello."}
_RESULT = {"role": "tool", "name": _CALL_NAME, "tool_call_id": "callabc01", "content": "Done."}
_TOOL = {
    "type": "function",
    "function": {
        "name": _TOOL_NAME,
        "description": "Helps.",
        "parameters": {
            "type": "object",
            "properties": {"kvspan": {"type": "string", "description": "Any."}},
            "required": ["kvspan"],
        },
    },
}


def _calling(*, null: bool, objects: bool) -> dict[str, Any]:
    arguments: Any = {"kvspan": "x"} if objects else '{"kvspan": "x"}'
    function = {"name": _CALL_NAME, "arguments": arguments}
    call = {"id": "callabc01", "type": "function", "function": function}  # some want nine letters
    return {"role": "assistant", "content": None if null else "", "tool_calls": [call]}
