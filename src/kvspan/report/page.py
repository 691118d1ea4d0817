"""One HTML file that needs no other: headings, sentences, tables, plots. Knows not what they say."""

from collections.abc import Sequence
from html import escape

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 75rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums; font-size: 13px; }
th, td { padding: .2rem .6rem; border-bottom: 1px solid #ddd; text-align: right; }
th:first-child, td:first-child { text-align: left; font-family: ui-monospace, monospace; }
"""


class Page:
    """A page that grows downwards.

    Args:
        title: of the page.
    """

    def __init__(self, title: str) -> None:
        self._title = title
        self._parts = [f"<h1>{escape(title)}</h1>"]

    def heading(self, text: str) -> None:
        """A heading."""
        self._parts.append(f"<h2>{escape(text)}</h2>")

    def paragraph(self, text: str) -> None:
        """A sentence or several."""
        self._parts.append(f"<p>{escape(text)}</p>")

    def table(self, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """A table, its first column to the left."""
        head = "".join(f"<th>{escape(text)}</th>" for text in heads)
        body = "".join(
            "<tr>" + "".join(f"<td>{escape(text)}</td>" for text in row) + "</tr>" for row in rows
        )
        self._parts.append(f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>")

    def plot(self, svg: str) -> None:
        """A plot, as `report.plot` makes them."""
        self._parts.append(f"<figure>{svg}</figure>")

    def html(self) -> str:
        """The file."""
        head = f'<meta charset="utf-8"><title>{escape(self._title)}</title><style>{_STYLE}</style>'
        return f"<!doctype html><html><head>{head}</head><body>{''.join(self._parts)}</body></html>\n"
