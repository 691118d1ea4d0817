"""JSON, character by character: where a value ends, and that it can still be one.

Knows brackets, strings and which characters JSON has outside of them; whether what it passed is JSON is
for `json.loads` to say. Knows no tools.
"""

_OUTSIDE = frozenset(' \t\r\n{}[]:,"0123456789+-.eEtrufalsn')
"""Characters of JSON outside of strings: those of layout, of numbers, and of true, false and null."""


class JsonScanner:
    """Follows a JSON object from its opening brace."""

    def __init__(self) -> None:
        self.depth = 0
        self.in_string = False
        self._escaped = False

    def take(self, character: str) -> str | None:
        """Takes the next character.

        Returns:
            The character as JSON writes it (a line break inside a string, which models write plainly, is
            escaped), or None if no JSON goes on so; it is not taken then.
        """
        if self.in_string:
            return self._take_in_string(character)
        if character not in _OUTSIDE:
            return None
        if character == '"':
            self.in_string = True
        self.depth += (character in "{[") - (character in "}]")
        return character

    def _take_in_string(self, character: str) -> str:
        if self._escaped:
            self._escaped = False
        elif character == "\\":
            self._escaped = True
        elif character == '"':
            self.in_string = False
        return character if character >= " " else f"\\u{ord(character):04x}"
