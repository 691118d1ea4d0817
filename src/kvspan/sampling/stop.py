"""Stop strings in text that arrives in pieces. Knows strings. Knows no tokens and no requests."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Released:
    """Text that nothing to come can take back.

    Args:
        text: goes to the user.
        stop: the stop string that ends the output here; None = it goes on.
    """

    text: str
    stop: str | None = None


class StopChecker:
    """Lets text through, up to the first stop string.

    Text is held back only while it may become a stop string: the longest end of it with which some
    stop string begins. Of several stop strings the one that is complete first ends the output, and of
    those that are complete at once the longest. So the outcome does not depend on where pieces are cut.

    Args:
        stop: the stop strings, none of them empty; there need not be any.
        include_stop: let the stop string through too. Nothing is held back then, as all of it is text.
    """

    def __init__(self, stop: Sequence[str], *, include_stop: bool = False) -> None:
        self._progress = [_Progress(string) for string in stop]
        self._include_stop = include_stop
        self._held = ""

    def push(self, piece: str, *, may_stop: bool = True) -> Released:
        """Takes the next piece of text.

        Args:
            piece: as it was decoded; may be empty.
            may_stop: False while the output has fewer than `min_tokens` tokens: a stop string that is
                complete within this piece is text like any other.

        Returns:
            The text that is sure by now. After a stop string nothing more is to be pushed.
        """
        text = self._held + piece
        for end, character in enumerate(piece, start=len(self._held) + 1):
            if (stop := self._advance(character)) is not None and may_stop:
                self._held = ""
                return Released(text[: end if self._include_stop else end - len(stop)], stop)
        hold = 0 if self._include_stop else max((p.matched for p in self._progress), default=0)
        sure = len(text) - hold
        self._held = text[sure:]
        return Released(text[:sure])

    def flush(self) -> str:
        """The text still held back: the output has ended, so it becomes no stop string any more."""
        text, self._held = self._held, ""
        return text

    def _advance(self, character: str) -> str | None:
        """The longest stop string that `character` completes."""
        complete = [p.string for p in self._progress if p.advance(character)]
        return max(complete, key=len, default=None)


class _Progress:
    """How much of one stop string the text ends with (Knuth, Morris and Pratt, 1977).

    A character costs constant time on average however long the string is, as a fallback never looks
    at text again.
    """

    def __init__(self, string: str) -> None:
        self.string = string
        self.matched = 0
        self._shorter = [0, 0]  # [k]: the longest proper prefix of string[:k] that is also its end
        for character in string[1:]:
            self._shorter.append(self._longer(self._shorter[-1], character))

    def advance(self, character: str) -> bool:
        """Takes one character; whether it completes the string."""
        self.matched = self._longer(self.matched, character)
        if self.matched < len(self.string):
            return False
        self.matched = self._shorter[self.matched]  # an end of it may begin the next one
        return True

    def _longer(self, matched: int, character: str) -> int:
        """What is matched once `character` follows a match of `matched` characters."""
        while matched and self.string[matched] != character:
            matched = self._shorter[matched]
        return matched + (self.string[matched] == character)
