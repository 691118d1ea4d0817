"""Tables as text: the same rows for a terminal, a CSV file and a page. Knows no figures."""

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table

MISSING = "-"
"""Stands for a value that nobody measured."""


@dataclass(frozen=True, slots=True)
class TextTable:
    """Rows of cells as they are to be read.

    Args:
        title: what it shows; may be empty.
        columns: their headings; the first one's cells are names, the others' are figures.
        rows: as many cells each as there are columns.
        note: says under it what headings mean; may be empty.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""

    def rich(self) -> Table:
        """For a terminal."""
        table = Table(
            title=self.title or None,
            title_justify="left",
            caption=self.note or None,
            caption_justify="left",
        )
        for index, column in enumerate(self.columns):
            table.add_column(column, justify="right" if index else "left", no_wrap=not index)
        for row in self.rows:
            table.add_row(*row)
        return table


def csv_text(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A CSV file's content; None becomes an empty cell.

    Args:
        columns: headings.
        rows: cells.
    """
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(rows)
    return out.getvalue()


def number(value: float | None, digits: int = 1) -> str:
    """A figure for readers, with thousands apart.

    Args:
        value: None = nobody measured it.
        digits: after the point.
    """
    return MISSING if value is None else f"{value:,.{digits}f}"


def share(value: float | None) -> str:
    """A share of 1 in percent."""
    return MISSING if value is None else f"{value:.1%}"
