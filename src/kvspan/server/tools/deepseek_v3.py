"""DeepSeek-V3 and R1: a section of calls, each a name and a fenced JSON object between marks.

    [calls begin][call begin]function[sep]f
    ```json
    {...}
    ```[call end][calls end]

V3.1 writes the name where `function` stands, and the object without a fence; both are read.
"""

import json
from collections.abc import Sequence

from kvspan.server.tools.contract import Tool
from kvspan.server.tools.json_call import schema_in_lark
from kvspan.server.tools.reader import BrokenCall, Parse, Reader

OPEN, CLOSE = "<\uff5ctool\u2581calls\u2581begin\uff5c>", "<\uff5ctool\u2581calls\u2581end\uff5c>"
CALL, END_CALL = "<\uff5ctool\u2581call\u2581begin\uff5c>", "<\uff5ctool\u2581call\u2581end\uff5c>"
SEPARATOR = "<\uff5ctool\u2581sep\uff5c>"
KIND, FENCE, END_FENCE = "function", "```json", "```"


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
    head = yield from reader.name_until(SEPARATOR)
    fenced = head == KIND
    name = (yield from reader.name_until("\n")) if fenced else head
    if fenced:
        yield from reader.need(FENCE)
    reader.tell_call(name)
    yield from reader.arguments()
    if fenced:
        yield from reader.accept(END_FENCE)
    yield from reader.accept(END_CALL)
    reader.end_call()


def lark(tools: Sequence[Tool], *, several: bool) -> str:
    """A grammar of answers that are calls."""
    more = '("\\n" call)*' if several else ""
    head, tail = json.dumps(f"{CALL}{KIND}{SEPARATOR}"), json.dumps(f"\n{END_FENCE}{END_CALL}")
    any_of = " | ".join(f"f{i}" for i in range(len(tools)))
    heads = [json.dumps(f"{tool.name}\n{FENCE}\n") for tool in tools]
    rules = [
        f"f{i}: {opening} args{i}\nargs{i}: {schema_in_lark(tool)}"
        for i, (opening, tool) in enumerate(zip(heads, tools, strict=True))
    ]
    start = f"start: {json.dumps(OPEN)} call {more} {json.dumps(CLOSE)}"
    return "\n".join([start, f"call: {head} ({any_of}) {tail}", *rules])
