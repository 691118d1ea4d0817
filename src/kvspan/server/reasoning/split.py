"""An answer's reasoning and the answer itself, told apart as they come.

Models think first and speak then, with a mark after the thought; before it there is one too, unless the
chat template has written that already. Knows marks. Knows no tools and no HTTP.
"""

from dataclasses import dataclass
from enum import Enum, auto


class Beginning(Enum):
    """How an answer begins."""

    INSIDE = auto()
    """Within a thought, whose mark the prompt has, or nobody writes."""
    OPEN = auto()
    """With a thought if the model writes its mark."""
    CONTENT = auto()
    """Without one: the prompt has closed it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningStyle:
    """How a family of models marks its thoughts.

    Args:
        name: for `--reasoning-parser`.
        opening: before a thought.
        closing: after it.
        always_thinks: whether an answer begins with a thought also where nothing says so.
    """

    name: str
    opening: str = "<think>"
    closing: str = "</think>"
    always_thinks: bool = False

    def beginning(self, prompt: str) -> "Beginning":
        """How an answer to a prompt begins.

        Args:
            prompt: as the chat template wrote it, or its end.
        """
        end = prompt.rstrip()
        if end.endswith(self.closing):
            return Beginning.CONTENT
        inside = self.always_thinks or end.endswith(self.opening)
        return Beginning.INSIDE if inside else Beginning.OPEN


@dataclass(frozen=True, slots=True)
class Split:
    """A piece of an answer.

    Args:
        reasoning: of the thought.
        content: of what follows it.
    """

    reasoning: str = ""
    content: str = ""


class ReasoningSplitter:
    """Splits one answer; the pieces do not depend on where the text is cut.

    A thought is told without the marks and the space next to them inside, what follows it without the
    line breaks before. A mark further on is text like any other: there is one thought.

    Args:
        style: the marks.
        inside: whether the text begins within a thought.
    """

    def __init__(self, style: ReasoningStyle, *, inside: bool) -> None:
        self._style = style
        self._stage = _IN_THOUGHT if inside else _BEFORE
        self._said = False  # anything of this stage
        self._held = ""

    @property
    def in_content(self) -> bool:
        """Whether the thought, if there was one, is over."""
        return self._stage in (_AFTER, _CONTENT)

    def push(self, text: str) -> Split:
        """What is certain with this further text."""
        self._held += text
        before = reasoning = ""
        if self._stage == _BEFORE:
            before = self._open()
        if self._stage == _IN_THOUGHT:
            reasoning = self._think()
        return Split(reasoning, before + self._speak())

    def finish(self) -> Split:
        """What was held back; no text follows."""
        held, self._held = self._held, ""
        if self._stage == _IN_THOUGHT:
            return Split(reasoning=held.rstrip() if held.isspace() else held)
        return Split(content="" if self._stage == _AFTER else held)

    def _open(self) -> str:
        """Looks for the mark before a thought, which nothing but space may precede."""
        text, mark = self._held.lstrip(), self._style.opening
        if text.startswith(mark) or (len(text) < len(mark) and mark.startswith(text)):
            if len(text) >= len(mark):
                self._held, self._stage = text[len(mark) :], _IN_THOUGHT
            return ""
        self._stage = _CONTENT
        return ""

    def _think(self) -> str:
        """Lets the thought pass up to the mark after it."""
        mark = self._style.closing
        if not self._said:
            # A template may have opened the thought, and the model all the same opens it once more.
            self._held, opening = self._held.lstrip(), self._style.opening
            while self._held.startswith(opening):
                self._held = self._held.removeprefix(opening).lstrip()
            if self._held and opening.startswith(self._held):
                return ""
        at = self._held.find(mark)
        if at >= 0:
            thought, self._held = self._held[:at].rstrip(), self._held[at + len(mark) :]
            self._stage = _AFTER
            return thought
        thought = self._held[: len(self._held) - _unsure(self._held, mark)].rstrip()
        self._held = self._held[len(thought) :]
        self._said = self._said or bool(thought)
        return thought

    def _speak(self) -> str:
        """Lets what follows the thought pass."""
        if self._stage == _AFTER:
            self._held = self._held.lstrip("\n")
            self._stage = _CONTENT if self._held else _AFTER
        if self._stage != _CONTENT:
            return ""
        content, self._held = self._held, ""
        return content


_BEFORE, _IN_THOUGHT, _AFTER, _CONTENT = range(4)


def _unsure(text: str, mark: str) -> int:
    """Characters at the end of a text that may become a mark."""
    sizes = range(min(len(text), len(mark) - 1), 0, -1)
    return next((n for n in sizes if mark.startswith(text[-n:])), 0)
