"""Forms for tests that no real request has. Knows text alone."""

_LETTERS = "abcdefghijkl"

EXPLOSIVE = "\n".join([f"start: ({' | '.join(_LETTERS)})*", *(f'{x}: "x" {x} | "x"' for x in _LETTERS)])
"""A grammar, in Lark's syntax, of nothing but x, for which each further x is more work than the last:
after a hundred or so the grammar library gives up."""
