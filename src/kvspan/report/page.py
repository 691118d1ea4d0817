"""One HTML file that needs nothing else: text, tables and drawings, in light and in dark."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from kvspan.errors import ConfigError
from kvspan.report.plots import Plot, svg
from kvspan.report.table import TextTable

_STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums; }
caption { text-align: left; font-weight: 600; padding: .3rem 0; }
th, td { padding: .2rem .7rem; text-align: right; border-bottom: 1px solid #8884; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
.table { overflow-x: auto; }
.note { font-size: .85em; margin-top: -.7rem; }
.plots { display: flex; flex-wrap: wrap; gap: 1rem; }
.plots > * { background: #fff; border-radius: 6px; flex: 1 1 26rem; max-width: 40rem; }
.plots svg { width: 100%; height: auto; }
code, pre { background: #8882; border-radius: 4px; padding: .1rem .3rem; overflow-x: auto; }
"""


@dataclass(frozen=True, slots=True)
class Text:
    """A paragraph."""

    text: str


@dataclass(frozen=True, slots=True)
class Code:
    """Lines as they are, e.g. the command that made the page."""

    text: str


@dataclass(frozen=True, slots=True)
class Heading:
    """Opens a section."""

    text: str


@dataclass(frozen=True, slots=True)
class Plots:
    """Drawings side by side, as far as there is room."""

    plots: Sequence[Plot]


Part = Text | Code | Heading | Plots | TextTable


def page(title: str, parts: Sequence[Part]) -> str:
    """The page's HTML.

    Args:
        title: of the page.
        parts: in order.
    """
    body = "\n".join(map(_html, parts))
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        f"<h1>{escape(title)}</h1>\n{body}\n</body>\n</html>\n"
    )


def check_places(*paths: Path | None) -> None:
    """Refuses files that cannot be written, before minutes go into what would stand in them.

    Args:
        paths: of files; None = none is wanted.

    Raises:
        ConfigError: there is no such directory, or one stands there.
    """
    for path in paths:
        if path is None:
            continue
        if path.is_dir():
            raise ConfigError(f"The report {path} cannot be written: it is a directory, name a file.")
        if not path.parent.is_dir():
            raise ConfigError(
                f"The report {path} cannot be written: there is no directory {path.parent}."
            )


def write_text(text: str, path: Path) -> None:
    """Writes a report's file.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"The report {path} cannot be written: {error.strerror}.") from None


def _html(part: Part) -> str:
    match part:
        case Text(text):
            return f"<p>{escape(text)}</p>"
        case Code(text):
            return f"<pre>{escape(text)}</pre>"
        case Heading(text):
            return f"<h2>{escape(text)}</h2>"
        case Plots(plots):
            drawn = "\n".join(f"<figure>{svg(plot)}</figure>" for plot in plots)
            return f'<div class="plots">\n{drawn}\n</div>'
        case TextTable():
            return _table(part)


def _table(table: TextTable) -> str:
    head = "".join(f"<th>{escape(column)}</th>" for column in table.columns)
    rows = "\n".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in table.rows
    )
    caption = f"<caption>{escape(table.title)}</caption>" if table.title else ""
    content = f"{caption}<thead><tr>{head}</tr></thead>\n<tbody>{rows}</tbody>"
    note = f'<p class="note">{escape(table.note)}</p>' if table.note else ""
    return f'<div class="table"><table>{content}</table>{note}</div>'
