"""The seam for whatever takes an answer's text apart: reasoning, tool calls, plain words.

A parser gets the text of one output in pieces, cut anywhere, and says what each piece adds to the
message. Knows no HTTP and no engine.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvspan.server.replies import ToolCall


@dataclass(frozen=True, slots=True)
class Addition:
    """What a piece of text adds to a message.

    Args:
        content: to what the user reads.
        reasoning: to what the model thought before it.
        tool_calls: calls, or the next parts of them; each has its `index`.
    """

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()


class AnswerParser(Protocol):
    """Takes one output apart."""

    def push(self, text: str, token_ids: Sequence[int]) -> Sequence[Addition]:
        """Takes the next piece.

        Args:
            text: that became certain; may be empty.
            token_ids: that were sampled since the last piece; their text may still be held back.
        """
        ...

    def finish(self) -> Sequence[Addition]:
        """What is still held back: nothing follows."""
        ...

    @property
    def made_calls(self) -> bool:
        """Whether the output ends in tool calls."""
        ...

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens of reasoning so far."""
        ...


ParserFactory = Callable[[], AnswerParser]
"""Makes the parser of one output of a request."""
