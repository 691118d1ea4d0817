"""How the served model writes what is not plain content: its calls and its thoughts."""

from dataclasses import dataclass
from typing import Self

from kvspan.server.reasoning.registry import find_style as find_reasoning
from kvspan.server.reasoning.split import ReasoningStyle
from kvspan.server.tools.registry import Style
from kvspan.server.tools.registry import find_style as find_tools


@dataclass(frozen=True, slots=True)
class Styles:
    """How a model writes what is not plain content.

    Args:
        tools: its calls.
        reasoning: its thoughts; None = it has no marks for them.
        why: of both, for the start.
    """

    tools: Style
    reasoning: ReasoningStyle | None
    why: str

    @classmethod
    def of(
        cls,
        *,
        tool_call_parser: str,
        reasoning_parser: str,
        chat_template: str,
        architecture: str,
        shows_tools: bool,
    ) -> Self:
        """The styles that options ask for.

        Args:
            tool_call_parser: a name, or "auto".
            reasoning_parser: a name, "none" or "auto".
            chat_template: the model's, may be empty.
            architecture: as its config names it.
            shows_tools: whether the chat template has a place for tools.
        """
        tools, why_tools = find_tools(
            tool_call_parser, chat_template=chat_template, architecture=architecture
        )
        reasoning, why_reasoning = find_reasoning(reasoning_parser, chat_template=chat_template)
        name = reasoning.name if reasoning else "none"
        blind = "" if shows_tools else ", but the chat template tells the model of no tools"
        return cls(
            tools, reasoning, f"calls {tools.name}: {why_tools}{blind}; thoughts {name}: {why_reasoning}"
        )
