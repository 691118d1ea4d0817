"""Text that is still coming, read as if it were all there.

A style's parser is a generator: it reads with `yield from`, and is suspended whenever what it asks for
depends on text that has not come. So each style is written once, top-down, and streams. Knows what
content, calls and broken calls are. Knows no style.
"""

import json
from collections.abc import Generator
from typing import TypeAlias, TypeVar

from kvspan.server.tools.contract import Arguments, CallBegins, CallBroken, Content, Delta, NewId
from kvspan.server.tools.scan import JsonScanner

T = TypeVar("T")
Parse: TypeAlias = Generator[None, None, T]
"""A reading that yields whenever it needs more text."""

MAX_NAME_CHARACTERS = 256
"""Of a function's name; the field allows 64. Bounds what is held back of a call that is none."""


class BrokenCall(Exception):
    """What was read is no call after all."""


class Reader:
    """The text, and the deltas that have been made of it.

    Args:
        new_id: makes ids of calls.
    """

    def __init__(self, new_id: NewId) -> None:
        self._new_id = new_id
        self._pending = ""
        self._num_fed = 0
        self._ended = False
        self._deltas: list[Delta] = []
        self._num_calls = 0
        self._silent = True  # nothing but space since the beginning or a call
        self._call: list[str] = []  # the call being read, as the model wrote it
        self._index: int | None = None  # of that call, once it has been told
        self._bare = True  # nothing but marks and space of it has been read

    def feed(self, text: str) -> None:
        """Appends text."""
        self._pending += text
        self._num_fed += len(text)

    def end(self) -> None:
        """Says that no text follows."""
        self._ended = True

    def take_deltas(self) -> list[Delta]:
        """The deltas since the last time."""
        deltas, self._deltas = self._deltas, []
        return deltas

    def content_until(self, *marks: str) -> Parse[str | None]:
        """Lets content pass up to a mark, which opens a call.

        Space between calls, and between a call and an end of the text, is layout and dropped; so is
        the beginning of a mark that ends the text after a call.

        Returns:
            The mark, or None at the end of the text.
        """
        while True:
            at, mark = _find(self._pending, marks)
            text = self._pending[: len(self._pending) - _unsure(self._pending, marks) if at < 0 else at]
            if not (self._silent and (not text or text.isspace())):
                self._say(text)
                self._pending = self._pending[len(text) :]
            if at >= 0:
                self._open(self._pending.index(mark) + len(mark))
                return mark
            if not (yield from self._more()):
                break
        last = self._pending.strip()
        begins_mark = not last or any(mark.startswith(last) for mark in marks)
        if not (self._silent and self._num_calls and begins_mark):
            self._say(self._pending)
        self._pending = ""
        return None

    def opens_with(self, mark: str) -> Parse[bool]:
        """Takes a mark that opens a call right here, after space at the most; whether it was there."""
        found = yield from self._ahead((mark,))
        if found:
            self._open(self._pending.index(mark) + len(mark))
        return found is not None

    def opens_before(self, mark: str) -> Parse[bool]:
        """Whether a call begins right here, after space at the most, whose own text begins so."""
        found = yield from self._ahead((mark,))
        if found:
            self._open(self._pending.index(mark))
        return found is not None

    def accept(self, *marks: str) -> Parse[str | None]:
        """Takes one of the marks if it is next, after space at the most; else nothing is taken.

        The beginning of a mark at which the text is cut off is taken too: it belongs to the call.
        """
        mark = yield from self._ahead(marks)
        if mark is not None:
            self._take(self._pending.index(mark) + len(mark), layout=True)
        elif self._ended and any(each.startswith(self._pending.lstrip()) for each in marks):
            self._take(len(self._pending), layout=True)
        return mark

    def need(self, *marks: str) -> Parse[str]:
        """The same where a call is none without it.

        Raises:
            BrokenCall: something else is next.
        """
        mark = yield from self.accept(*marks)
        if mark is None:
            raise BrokenCall
        return mark

    def name_until(self, mark: str) -> Parse[str]:
        """Text up to a mark, which is taken.

        Raises:
            BrokenCall: the text ends before it, or is no name.
        """
        while (at := self._pending.find(mark)) < 0:
            if len(self._pending) > MAX_NAME_CHARACTERS or not (yield from self._more()):
                raise BrokenCall
        name = self._pending[:at].strip()
        if not name or at > MAX_NAME_CHARACTERS or any(c in "<>\n" for c in name):
            raise BrokenCall
        self._take(at + len(mark))
        return name

    def text_until(self, *marks: str, hold: str = "") -> Parse[tuple[str, str | None]]:
        """Text inside a call up to a mark, as far as it has come.

        Args:
            marks: the mark that is met first is taken.
            hold: text before a mark that is kept back with it, until it is known whether one follows.

        Returns:
            Text, and the mark that ended it; None = there is more.

        Raises:
            BrokenCall: the text ends before a mark.
        """
        while True:
            at, mark = _find(self._pending, marks)
            if at >= 0:
                return self._take(at + len(mark))[:at], mark
            held = _unsure(self._pending, (*marks, *(hold + each for each in marks)))
            if len(self._pending) > held:
                return self._take(len(self._pending) - held), None
            if not (yield from self._more()):
                raise BrokenCall

    def characters(self) -> Parse[str]:
        """What has come, at least one character; not taken yet.

        Raises:
            BrokenCall: the text ends here.
        """
        if not self._pending and not (yield from self._more()):
            raise BrokenCall
        return self._pending

    def skip_space(self) -> Parse[None]:
        """Takes white space inside a call."""
        while not (self._pending and not self._pending.isspace()):
            if not (yield from self._more()):
                break
        self._take(len(self._pending) - len(self._pending.lstrip()))

    def take(self, num_characters: int) -> str:
        """Takes characters of a call."""
        return self._take(num_characters)

    def arguments(self) -> Parse[None]:
        """Tells a JSON object as arguments of the call, as it comes.

        Raises:
            BrokenCall: it is none.
        """
        yield from self.skip_space()
        scanner, written, valid = JsonScanner(), list[str](), True
        while valid and not (written and scanner.depth == 0):
            fragment: list[str] = []
            for character in (yield from self.characters()):
                piece = scanner.take(character) if scanner.depth or character == "{" else None
                if piece is None:
                    valid = False
                    break
                fragment.append(piece)
                if scanner.depth == 0:
                    break
            self._take(len(fragment))
            written += fragment
            self.tell_arguments("".join(fragment))
        if not (valid and is_object("".join(written))):
            raise BrokenCall

    def tell_call(self, name: str, *, call_id: str | None = None) -> None:
        """Says that a call has begun."""
        self._index, self._num_calls = self._num_calls, self._num_calls + 1
        self._deltas.append(CallBegins(self._index, call_id or self._new_id(), name))

    def tell_arguments(self, fragment: str) -> None:
        """Says more of the call's arguments."""
        assert self._index is not None, "arguments of no call"
        if fragment:
            self._deltas.append(Arguments(self._index, fragment))

    def end_call(self) -> None:
        """The call is whole."""
        self._index, self._silent = None, True

    def break_call(self) -> None:
        """What was read as a call is none, and becomes content; marks that end a text do not."""
        text = "".join(self._call)
        if self._index is None:
            self._say("" if self._bare and self._ended and not self._pending else text)
        else:
            self._deltas.append(CallBroken(self._index, text))
        self._index, self._silent = None, False

    def _more(self) -> Parse[bool]:
        """Waits for text; whether any came."""
        before = self._num_fed
        while self._num_fed == before:
            if self._ended:
                return False
            yield
        return True

    def _ahead(self, marks: tuple[str, ...]) -> Parse[str | None]:
        """The mark that is next, after space at the most; nothing is taken."""
        while True:
            text = self._pending.lstrip()
            for mark in marks:
                if text.startswith(mark):
                    return mark
            if text and not any(mark.startswith(text) for mark in marks):
                return None
            if not (yield from self._more()):
                return None

    def _open(self, size: int) -> None:
        self._call.clear()
        self._bare = True
        self._take(size, layout=True)

    def _take(self, size: int, *, layout: bool = False) -> str:
        taken, self._pending = self._pending[:size], self._pending[size:]
        self._call.append(taken)
        self._bare &= layout or not taken or taken.isspace()
        return taken

    def _say(self, text: str) -> None:
        if text:
            self._deltas.append(Content(text))
            self._silent = False


def is_object(text: str) -> bool:
    """Whether a text is one JSON object."""
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def _find(text: str, marks: tuple[str, ...]) -> tuple[int, str]:
    """Where the first of the marks begins, and which; (-1, "") = none is there."""
    found = [(at, mark) for mark in marks if (at := text.find(mark)) >= 0]
    return min(found, default=(-1, ""))


def _unsure(text: str, marks: tuple[str, ...]) -> int:
    """Characters at the end of a text that may become a mark."""
    longest = min(len(text), max(map(len, marks)) - 1)
    sizes = range(longest, 0, -1)
    return next((n for n in sizes if any(mark.startswith(text[-n:]) for mark in marks)), 0)
