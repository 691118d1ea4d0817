"""Hermes and Qwen: `<tool_call>{"name": "f", "arguments": {...}}</tool_call>`, one mark a call."""

from collections.abc import Sequence

from kvspan.server.tools.contract import Tool
from kvspan.server.tools.json_call import call_in_lark, read_json_call
from kvspan.server.tools.reader import BrokenCall, Parse, Reader

OPEN, CLOSE = "<tool_call>", "</tool_call>"


def parse(reader: Reader, tools: Sequence[Tool]) -> Parse[None]:  # noqa: ARG001
    """Reads an answer."""
    while (yield from reader.content_until(OPEN)):
        try:
            yield from read_json_call(reader)
        except BrokenCall:
            reader.break_call()
        else:
            yield from reader.accept(CLOSE)
            reader.end_call()


def lark(tools: Sequence[Tool], *, several: bool) -> str:
    """A grammar of answers that are calls."""
    more = '("\\n" one)*' if several else ""
    one = f'one: "{OPEN}\\n" call "\\n{CLOSE}"'
    return "\n".join([f"start: one {more}", one, call_in_lark(tools, arguments="arguments")])
