"""Which tools a request has, and whether the model must call one. Knows OpenAI's names; no styles."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvspan.errors import RequestError, blaming
from kvspan.server.tools.contract import Tool

MAX_TOOLS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolChoice:
    """The tools of a request.

    Args:
        tools: all that the model is told of.
        callable: whether calls are looked for in its answer.
        forced: tools of which it must call one; none = it is free.
        several: whether an answer that must call may call more than once.
    """

    tools: tuple[Tool, ...] = ()
    callable: bool = False
    forced: tuple[Tool, ...] = ()
    several: bool = True


def read_choice(
    tools: Sequence[Mapping[str, Any]] | None,
    tool_choice: str | Mapping[str, Any] | None,
    *,
    parallel: bool | None,
) -> ToolChoice:
    """Reads a chat request's `tools`, `tool_choice` and `parallel_tool_calls`.

    Raises:
        RequestError: a tool is none, or the choice names one that is not there.
    """
    known = _tools(tools or ())
    with blaming("tool_choice"):
        return _read(known, tool_choice, several=parallel is not False)


def _read(
    known: tuple[Tool, ...], tool_choice: str | Mapping[str, Any] | None, *, several: bool
) -> ToolChoice:
    if tool_choice is None or tool_choice == "auto":
        return ToolChoice(tools=known, callable=bool(known))
    if tool_choice == "none":
        return ToolChoice(tools=known)
    if not known:
        raise RequestError("tool_choice needs tools, and the request has none.")
    if tool_choice == "required":
        return ToolChoice(tools=known, callable=True, forced=known, several=several)
    chosen = tool_choice if isinstance(tool_choice, Mapping) else {}
    if chosen.get("type") == "function":
        named = _named(chosen, known)
        return ToolChoice(tools=known, callable=True, forced=(named,), several=False)
    if chosen.get("type") == "allowed_tools":
        return _allowed(chosen, known, several=several)
    raise RequestError(
        'tool_choice must be "none", "auto", "required" or {"type": "function", "function": '
        f'{{"name": ...}}}}, got {str(tool_choice)[:60]!r}.'
    )


def _tools(tools: Sequence[Mapping[str, Any]]) -> tuple[Tool, ...]:
    if len(tools) > MAX_TOOLS:
        raise RequestError(
            f"The request has {len(tools)} tools; {MAX_TOOLS} is the most.", param="tools"
        )
    found = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools)]
    if len({tool.name for tool in found}) < len(found):
        raise RequestError("Two tools of the request have the same name.", param="tools")
    return tuple(found)


def _tool(tool: Mapping[str, Any], where: str) -> Tool:
    kind, function = tool.get("type", "function"), tool.get("function")
    if kind != "function" or not isinstance(function, Mapping):
        raise RequestError(
            f'{where} must be {{"type": "function", "function": {{"name": ...}}}}; '
            + (
                "it has no function."
                if kind == "function"
                else f"got type {str(kind)[:60]!r}, which only OpenAI itself could run."
            ),
            param=f"{where}.function" if kind == "function" else f"{where}.type",
        )
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not name or any(c in name for c in '<>"\n') or len(name) > 256:
        param = f"{where}.function.name"
        raise RequestError(f"{param} must be a name, got {str(name)[:60]!r}.", param=param)
    if not isinstance(parameters, dict | None):
        param = f"{where}.function.parameters"
        raise RequestError(f"{param} must be a JSON schema, an object.", param=param)
    return Tool(name, parameters or {})


def _named(choice: Mapping[str, Any], tools: Sequence[Tool]) -> Tool:
    function = choice.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    for tool in tools:
        if tool.name == name:
            return tool
    raise RequestError(
        f"tool_choice names {str(name)[:60]!r}; the tools are {', '.join(t.name for t in tools)}."
    )


def _allowed(choice: Any, known: tuple[Tool, ...], *, several: bool) -> ToolChoice:
    """OpenAI's way to name some of the tools: the model is told of all, so its prompt stays the same."""
    allowed = choice.get("allowed_tools")
    listed = allowed.get("tools") if isinstance(allowed, Mapping) else None
    if (
        not isinstance(listed, list)
        or not all(isinstance(each, Mapping) for each in listed)
        or not listed
    ):
        raise RequestError("tool_choice.allowed_tools.tools must be a list of tools.")
    part = tuple(_named(each, known) for each in listed)
    forced = part if allowed.get("mode") == "required" else ()
    return ToolChoice(tools=known, callable=True, forced=forced, several=several)
