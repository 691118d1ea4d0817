"""Llama 3 and later: an answer that is `{"name": "f", "parameters": {...}}`, several with `; ` between.

Nothing but `<|python_tag|>`, which not every model writes, tells such an answer from one that is just
JSON; so it is a call only when it names a tool that the request has.
"""

from collections.abc import Sequence

from kvspan.server.tools.contract import Tool
from kvspan.server.tools.json_call import call_in_lark, read_json_call
from kvspan.server.tools.reader import BrokenCall, Parse, Reader

TAG = "<|python_tag|>"
BRACE = "{"


def parse(reader: Reader, tools: Sequence[Tool]) -> Parse[None]:
    """Reads an answer."""
    known = {tool.name for tool in tools}
    opened = (yield from reader.opens_with(TAG)) or (yield from reader.opens_before(BRACE))
    while opened or (yield from reader.content_until(TAG)):
        try:
            yield from read_json_call(reader, known=known)
        except BrokenCall:
            reader.break_call()
            opened = False
        else:
            reader.end_call()
            opened = (yield from reader.opens_with(";")) or (yield from reader.opens_before(BRACE))


def lark(tools: Sequence[Tool], *, several: bool) -> str:
    """A grammar of answers that are calls."""
    more = '("; " call)*' if several else ""
    return f"start: call {more}\n" + call_in_lark(tools, arguments="parameters")
