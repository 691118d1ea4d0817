"""Kimi-K2: a section of calls, each an id and a JSON object between marks.

    <|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{...}
    <|tool_call_end|><|tool_calls_section_end|>

The id holds the function's name, and is what the model wants to see again beside the tool's result.
"""

import json
from collections.abc import Sequence

from kvspan.server.tools.contract import Tool
from kvspan.server.tools.json_call import schema_in_lark
from kvspan.server.tools.reader import BrokenCall, Parse, Reader

OPEN, CLOSE = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL, ARGUMENTS, END_CALL = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
PREFIX = "functions."


def parse(reader: Reader, tools: Sequence[Tool]) -> Parse[None]:  # noqa: ARG001
    """Reads an answer."""
    while mark := (yield from reader.content_until(OPEN, CALL)):
        try:
            if mark == OPEN:
                yield from reader.need(CALL)
            yield from _call(reader)
            while (yield from reader.opens_with(CALL)):
                yield from _call(reader)
        except BrokenCall:
            reader.break_call()
        else:
            yield from reader.accept(CLOSE)


def _call(reader: Reader) -> Parse[None]:
    call_id = yield from reader.name_until(ARGUMENTS)
    name, _, number = call_id.removeprefix(PREFIX).rpartition(":")
    if not name or not number.isdecimal():
        raise BrokenCall
    reader.tell_call(name, call_id=call_id)
    yield from reader.arguments()
    yield from reader.accept(END_CALL)
    reader.end_call()


def lark(tools: Sequence[Tool], *, several: bool) -> str:
    """A grammar of answers that are calls."""
    any_of = " | ".join(f"f{i}" for i in range(len(tools)))
    rules = [
        f"f{i}: {json.dumps(f'{PREFIX}{tool.name}:')} NUMBER {json.dumps(ARGUMENTS)} args{i}\n"
        f"args{i}: {schema_in_lark(tool)}"
        for i, tool in enumerate(tools)
    ]
    start = f"start: {json.dumps(OPEN)} call{'+' if several else ''} {json.dumps(CLOSE)}"
    call = f"call: {json.dumps(CALL)} ({any_of}) {json.dumps(END_CALL)}"
    return "\n".join([start, call, "NUMBER: /[0-9]{1,3}/", *rules])
