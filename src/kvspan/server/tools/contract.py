"""What a tool-call parser takes and gives. Knows no style, no HTTP and no model.

A parser is pushed the model's text as it comes and gives deltas. Its state depends on the text alone and
never on where it was cut, so a stream and a whole answer are the same calls.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

Schema: TypeAlias = dict[str, Any]
"""A JSON schema."""

NewId: TypeAlias = Callable[[], str]
"""Makes the id of a call whose style has none of its own."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call.

    Args:
        name: as the model spells it.
        parameters: the schema of its arguments, an object.
    """

    name: str
    parameters: Schema = field(default_factory=dict)

    @property
    def properties(self) -> Schema:
        """Schemas of its arguments by name; none where the schema has none."""
        properties = self.parameters.get("properties")
        return properties if isinstance(properties, dict) else {}


@dataclass(frozen=True, slots=True)
class Content:
    """Text outside of calls, and calls that are none: what does not parse is said, not lost."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegins:
    """A call: its name is sure and its arguments follow.

    Args:
        index: 0.. in the answer.
        call_id: what the tool's result refers to.
        name: of the function.
    """

    index: int
    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """A piece of a call's arguments; joined, the pieces are a JSON object."""

    index: int
    fragment: str


@dataclass(frozen=True, slots=True)
class CallBroken:
    """A call that had begun and is none: its arguments are no JSON, or the text ended inside.

    Args:
        index: of the call.
        text: all of it as the model wrote it, to be shown as content if it was not shown as a call.
    """

    index: int
    text: str


Delta: TypeAlias = Content | CallBegins | Arguments | CallBroken


class ToolParser(Protocol):
    """Text -> deltas, for one answer."""

    def push(self, text: str) -> list[Delta]:
        """What is certain with this further text."""
        ...

    def finish(self) -> list[Delta]:
        """What was held back; no text follows."""
        ...


@dataclass(frozen=True, slots=True)
class Call:
    """A whole call.

    Args:
        call_id: what the tool's result refers to.
        name: of the function.
        arguments: a JSON object, as text.
    """

    call_id: str
    name: str
    arguments: str


def collect(deltas: Sequence[Delta]) -> tuple[str, list[Call]]:
    """The content and the calls of a whole answer; broken calls are content.

    Args:
        deltas: all of them, in order.
    """
    content: list[str] = []
    calls: dict[int, tuple[CallBegins, list[str]]] = {}
    for delta in deltas:
        match delta:
            case Content(text):
                content.append(text)
            case CallBegins(index):
                calls[index] = (delta, [])
            case Arguments(index, fragment):
                calls[index][1].append(fragment)
            case CallBroken(index, text):
                del calls[index]
                content.append(text)
    return "".join(content), [Call(b.call_id, b.name, "".join(parts)) for b, parts in calls.values()]
