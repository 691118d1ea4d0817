"""Qwen3-Coder: a call is a function with parameters in tags, and values are written as they are.

    <tool_call>
    <function=write>
    <parameter=path>
    a.txt
    </parameter>
    </function>
    </tool_call>

What a value is, the tool's schema says: a string is told as it comes, anything else at its end, as JSON.
"""

import json
from collections.abc import Sequence
from typing import Any

from kvspan.server.tools.contract import Schema, Tool
from kvspan.server.tools.json_call import LAYOUT
from kvspan.server.tools.reader import BrokenCall, Parse, Reader

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FUNCTION, END_FUNCTION = "<function=", "</function>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"


def parse(reader: Reader, tools: Sequence[Tool]) -> Parse[None]:
    """Reads an answer; the mark around a function may be missing, as models forget it."""
    properties = {tool.name: tool.properties for tool in tools}
    while mark := (yield from reader.content_until(OPEN, FUNCTION)):
        try:
            if mark == OPEN:
                yield from reader.need(FUNCTION)
            yield from _function(reader, properties)
        except BrokenCall:
            reader.break_call()
        else:
            yield from reader.accept(CLOSE)
            reader.end_call()


def _function(reader: Reader, by_tool: dict[str, Schema]) -> Parse[None]:
    name = yield from reader.name_until(">")
    reader.tell_call(name)
    properties = by_tool.get(name, {})
    before = "{"
    while (yield from reader.need(PARAMETER, END_FUNCTION)) == PARAMETER:
        key = yield from reader.name_until(">")
        reader.tell_arguments(f"{before}{json.dumps(key, ensure_ascii=False)}: ")
        before = ", "
        if (yield from reader.characters()).startswith("\n"):
            reader.take(1)
        yield from _value(reader, types_of(properties.get(key, {})))
    reader.tell_arguments("{}" if before == "{" else "}")


def _value(reader: Reader, types: frozenset[str]) -> Parse[None]:
    """Tells a value up to the end of its tag, without the line break before that."""
    is_string, mark = types == {"string"}, None
    whole = ""
    reader.tell_arguments('"' if is_string else "")
    while mark is None:
        text, mark = yield from reader.text_until(END_PARAMETER, hold="\n")
        text = text if mark is None else text.removesuffix("\n")
        if is_string:
            reader.tell_arguments(json.dumps(text, ensure_ascii=False)[1:-1])
        whole += text
    reader.tell_arguments('"' if is_string else _as_json(whole, types))


def types_of(schema: Any) -> frozenset[str]:
    """JSON types that a schema lets a value have; {"string"} where it does not say."""
    if not isinstance(schema, dict):
        return frozenset({"string"})
    if isinstance(values := schema.get("enum"), list) and values and "type" not in schema:
        return frozenset().union(*(_TYPE_NAMES.get(type(value), frozenset()) for value in values))
    if isinstance(kind := schema.get("type"), str):
        return frozenset({kind})
    if isinstance(kind, list):
        return frozenset(each for each in kind if isinstance(each, str))
    several = schema.get("anyOf") or schema.get("oneOf")
    if isinstance(several, list):
        return frozenset().union(*map(types_of, several))
    return frozenset({"object"}) if "$ref" in schema or "properties" in schema else frozenset({"string"})


_TYPE_NAMES = {
    str: frozenset({"string"}),
    bool: frozenset({"boolean"}),
    int: frozenset({"integer"}),
    float: frozenset({"number"}),
    type(None): frozenset({"null"}),
    dict: frozenset({"object"}),
    list: frozenset({"array"}),
}


def _as_json(text: str, types: frozenset[str]) -> str:
    """A value that need not be a string, as JSON; text that fits no type is a string."""
    spelled = {"True": "true", "False": "false", "None": "null"}.get(text.strip(), text.strip())
    try:
        value = json.loads(spelled)
        written = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    if "string" in types and not _TYPE_NAMES[type(value)] <= types:
        return json.dumps(text, ensure_ascii=False)
    return written


def lark(tools: Sequence[Tool], *, several: bool) -> str:
    """A grammar of answers that are calls; parameters come in the schema's order."""
    more = '("\\n" call)*' if several else ""
    functions = [_function_rules(i, tool) for i, tool in enumerate(tools)]
    any_of = " | ".join(f"f{i}" for i in range(len(tools)))
    call = f'call: "{OPEN}\\n" ({any_of}) "{END_FUNCTION}\\n{CLOSE}"'
    return "\n".join([f"start: call {more}", call, *functions])


def _function_rules(index: int, tool: Tool) -> str:
    properties, required = tool.properties, tool.parameters.get("required")
    needed = required if isinstance(required, list) else []
    marks = [f"f{index}p{i}" + ("" if key in needed else "?") for i, key in enumerate(properties)]
    head = json.dumps(f"{FUNCTION}{tool.name}>\n")
    rules = [f"f{index}: {head} {' '.join(marks)}"]
    definitions: Schema = {key: tool.parameters[key] for key in _SHARED if key in tool.parameters}
    for i, (key, schema) in enumerate(properties.items()):
        name, head = f"f{index}p{i}", json.dumps(f"{PARAMETER}{key}>\n")
        rules += _parameter_rules(name, head, schema, definitions)
    return "\n".join(rules)


_SHARED: tuple[str, ...] = ("$defs", "definitions")
"""Keys of a schema that references in its parts look into."""


def _parameter_rules(name: str, head: str, schema: Any, definitions: Schema) -> list[str]:
    tail = f'"\\n{END_PARAMETER}\\n"'
    values = schema.get("enum") if isinstance(schema, dict) else None
    if types_of(schema) == {"string"} and values:
        return [f"{name}: {head} ({' | '.join(map(json.dumps, values))}) {tail}"]
    if "string" in types_of(schema):
        end = json.dumps(f"\n{END_PARAMETER}\n")
        return [f"{name}: {head} {name}v", f"{name}v[suffix={end}]: /(?s:.*)/"]
    whole = json.dumps({**schema, **definitions, "x-guidance": LAYOUT})
    return [f"{name}: {head} {name}v {tail}", f"{name}v: %json {whole}"]
