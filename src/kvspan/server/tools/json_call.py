"""Calls written as one JSON object: `{"name": "f", "arguments": {...}}`. Knows no marks around them."""

import json
import re
from collections.abc import Container, Sequence

from kvspan.server.tools.contract import Tool
from kvspan.server.tools.reader import BrokenCall, Parse, Reader, is_object
from kvspan.server.tools.scan import JsonScanner

_HEAD = re.compile(r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)+")\s*,\s*"(?:arguments|parameters)"\s*:\s*')
"""Up to the arguments, where the name comes first; then they can be told as they come."""


def read_json_call(reader: Reader, *, known: Container[str] | None = None) -> Parse[None]:
    """Reads a call; with its name first, the arguments are told as they come, else at its end.

    Args:
        reader: of the text.
        known: names that make it a call; None = any.

    Raises:
        BrokenCall: it is none.
    """
    yield from reader.skip_space()
    scanner, written = JsonScanner(), ""
    while not (written and scanner.depth == 0):
        text = yield from reader.characters()
        size = 0
        for character in text:
            at_value = character == "{" and scanner.depth == 1 and not scanner.in_string
            if at_value and (name := _name(written, known)):
                reader.take(size)
                yield from _told(reader, name)
                return
            piece = scanner.take(character) if written or character == "{" else None
            if piece is None:
                reader.take(size)
                raise BrokenCall
            written += piece
            size += 1
            if scanner.depth == 0:
                break
        reader.take(size)
    name, arguments = _unwrapped(written, known)
    reader.tell_call(name)
    reader.tell_arguments(arguments)


def call_in_lark(tools: Sequence[Tool], *, arguments: str) -> str:
    """Rules for `read_json_call`: `call` is a call of any of the tools.

    Args:
        tools: those that may be called.
        arguments: the key of the arguments.
    """
    names = " | ".join(f"call{i}" for i in range(len(tools)))
    return "\n".join([f"call: {names}", *(_rule(i, tool, arguments) for i, tool in enumerate(tools))])


def schema_in_lark(tool: Tool) -> str:
    """The arguments of a tool as a Lark term: JSON in its usual layout, one space at the most."""
    schema = {"type": "object", **tool.parameters}
    return f"%json {json.dumps({**schema, 'x-guidance': LAYOUT})}"


LAYOUT = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "lenient": True,
}
"""Of JSON that nobody asked to be indented: a small model left free may write space without end. What of
a tool's schema the library does not hold to is left out, and the reply says so."""


def _rule(index: int, tool: Tool, arguments: str) -> str:
    head = f'{{"name": {json.dumps(tool.name)}, "{arguments}": '
    return f'call{index}: {json.dumps(head)} args{index} "}}"\nargs{index}: {schema_in_lark(tool)}'


def _told(reader: Reader, name: str) -> Parse[None]:
    reader.tell_call(name)
    yield from reader.arguments()
    yield from reader.accept("}")  # models forget it now and then


def _name(written: str, known: Container[str] | None) -> str | None:
    """The name, if all up to the arguments has been written."""
    found = _HEAD.fullmatch(written)
    try:
        name = json.loads(found[1]) if found else None
    except ValueError:
        return None
    return name if known is None or name in known else None


def _unwrapped(written: str, known: Container[str] | None) -> tuple[str, str]:
    """Name and arguments of a call whose keys came in another order."""
    if not is_object(written):
        raise BrokenCall
    call = json.loads(written)
    name = call.get("name")
    arguments = call.get("arguments", call.get("parameters"))
    if not isinstance(name, str) or not name or (known is not None and name not in known):
        raise BrokenCall
    if isinstance(arguments, str) and is_object(arguments):
        return name, arguments
    if not isinstance(arguments, dict | None):
        raise BrokenCall
    return name, json.dumps(arguments or {}, ensure_ascii=False)
