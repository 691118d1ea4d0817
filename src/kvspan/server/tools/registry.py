"""Tool-call styles by name, and which of them a model writes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvspan.server.tools import deepseek_v3, hermes, kimi_k2, llama3_json, qwen3_coder
from kvspan.server.tools.contract import Delta, NewId, Tool, ToolParser
from kvspan.server.tools.reader import Parse, Reader


class Lark(Protocol):
    """Writes a grammar of answers that are calls of these tools."""

    def __call__(self, tools: Sequence[Tool], *, several: bool) -> str:
        """Lark source; `several` lets an answer have more calls than one."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Style:
    """How a family of models writes calls.

    Args:
        name: for `--tool-call-parser`.
        parse: reads an answer.
        lark: a grammar that leaves no choice but to call.
        signs: what of it its models' chat templates have; all of one tuple.
        architectures: beginnings of names of architectures that write so.
    """

    name: str
    parse: Callable[[Reader, Sequence[Tool]], Parse[None]]
    lark: Lark
    signs: tuple[str, ...]
    architectures: tuple[str, ...] = ()

    def parser(self, tools: Sequence[Tool], *, new_id: NewId) -> ToolParser:
        """A parser for one answer.

        Args:
            tools: of the request.
            new_id: makes ids of calls.
        """
        return _Parser(self, tools, new_id)


STYLES = (
    Style(
        name="kimi_k2",
        parse=kimi_k2.parse,
        lark=kimi_k2.lark,
        signs=(kimi_k2.CALL,),
        architectures=("Kimi",),
    ),
    Style(
        name="deepseek_v3",
        parse=deepseek_v3.parse,
        lark=deepseek_v3.lark,
        signs=(deepseek_v3.CALL,),
        architectures=("Deepseek",),
    ),
    Style(
        name="qwen3_coder",
        parse=qwen3_coder.parse,
        lark=qwen3_coder.lark,
        signs=(qwen3_coder.FUNCTION, qwen3_coder.PARAMETER),
    ),
    Style(
        name="hermes",
        parse=hermes.parse,
        lark=hermes.lark,
        signs=(hermes.OPEN,),
        architectures=("Qwen",),
    ),
    Style(
        name="llama3_json",
        parse=llama3_json.parse,
        lark=llama3_json.lark,
        signs=('"parameters"',),
        architectures=("Llama4", "Mllama"),
    ),
)
"""In the order in which `auto` looks for their signs: the more telling ones first."""

NAMES = tuple(style.name for style in STYLES)


def find_style(name: str, *, chat_template: str, architecture: str) -> tuple[Style, str]:
    """The style that an option asks for.

    Args:
        name: of a style, or "auto".
        chat_template: the model's, may be empty.
        architecture: as its config names it.

    Returns:
        The style, and why it is this one.
    """
    for style in STYLES:
        if style.name == name:
            return style, "asked for"
    for style in STYLES:
        if all(sign in chat_template for sign in style.signs):
            return style, f"the chat template has {style.signs[0]}"
    for style in STYLES:
        if architecture.startswith(style.architectures):
            return style, f"{architecture} writes so"
    return next(s for s in STYLES if s.name == "hermes"), "the most common; this model names none"


class _Parser:
    """A style's reading of one answer, pushed along by its text."""

    def __init__(self, style: Style, tools: Sequence[Tool], new_id: NewId) -> None:
        self._reader = Reader(new_id)
        self._parse = style.parse(self._reader, tools)

    def push(self, text: str) -> list[Delta]:
        """What is certain with this further text."""
        self._reader.feed(text)
        next(self._parse, None)
        return self._reader.take_deltas()

    def finish(self) -> list[Delta]:
        """What was held back; no text follows."""
        self._reader.end()
        for _ in self._parse:
            raise AssertionError("a parser waits for text that will not come")
        return self._reader.take_deltas()
