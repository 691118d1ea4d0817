"""Plots as data, drawn to SVG or PNG. matplotlib is loaded when the first one is drawn.

Knows lines, points and axes. Knows neither what they mean nor where they go.
"""

import io
import re
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvspan.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = ("#1b6ca8", "#d1495b", "#2e8b57", "#b8860b", "#7b4fa3", "#5c6770")
"""Of lines in turn: apart in hue and in lightness, on white."""
_WIDTH_IN, _HEIGHT_IN = 6.4, 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Points of a plot, joined or not.

    Args:
        name: for the legend; empty = it is not listed.
        x: of each point.
        y: of each point.
        labels: beside each point; may be empty.
        joined: whether a line goes through the points.
        marked: whether each point is marked.
        dashed: whether the line is.
        color: an index into the colours; lines of one index look alike.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float]
    labels: Sequence[str] = ()
    joined: bool = True
    marked: bool = True
    dashed: bool = False
    color: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """Lines over two axes.

    Args:
        title: what it shows.
        x_label: with the unit.
        y_label: with the unit.
        lines: what is drawn.
        log_x: whether the x axis is logarithmic.
        zero_y: whether the y axis begins at 0.
    """

    title: str
    x_label: str
    y_label: str
    lines: Sequence[Line]
    log_x: bool = False
    zero_y: bool = True


def svg(plot: Plot) -> str:
    """An `<svg>` element to put into a page; the same text for the same plot."""
    buffer = io.StringIO()
    with _style(plot):
        _figure(plot).savefig(buffer, format="svg", metadata={"Date": None})
    return re.sub(r"^.*?(?=<svg)", "", buffer.getvalue(), flags=re.DOTALL)


def refuse_no_plot(path: Path) -> None:
    """Refuses a file that no plot can be written to, before minutes go into what it would show.

    Raises:
        ConfigError: it is neither `.svg` nor `.png`.
    """
    if path.suffix not in (".svg", ".png"):
        raise ConfigError(f"A plot is .svg or .png, not {path}.")


def save(plot: Plot, path: Path) -> None:
    """Writes a plot.

    Args:
        plot: what is drawn.
        path: ends in `.svg` or `.png`.

    Raises:
        ConfigError: it ends otherwise, or cannot be written.
    """
    refuse_no_plot(path)
    metadata = {"Date": None} if path.suffix == ".svg" else None
    try:
        with _style(plot):
            _figure(plot).savefig(path, dpi=150, metadata=metadata)
    except OSError as error:
        raise ConfigError(f"The plot {path} cannot be written: {error.strerror}.") from None


def _style(plot: Plot) -> AbstractContextManager[None]:
    """While it lasts, text stays text and ids are the same each time."""
    import matplotlib

    return matplotlib.rc_context({"svg.hashsalt": plot.title, "svg.fonttype": "none", "font.size": 9})


def _figure(plot: Plot) -> "Figure":
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH_IN, _HEIGHT_IN), layout="constrained")
    axes = figure.add_subplot()
    for line in plot.lines:
        _draw(line, axes)
    axes.set(title=plot.title, xlabel=plot.x_label, ylabel=plot.y_label)
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    if plot.log_x:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:g}")
    if plot.zero_y:
        axes.set_ylim(bottom=0)
    if any(line.name for line in plot.lines):
        axes.legend(frameon=False)
    return figure


def _draw(line: Line, axes: "Axes") -> None:
    color = COLORS[line.color % len(COLORS)]
    axes.plot(
        line.x,
        line.y,
        label=line.name or None,
        color=color,
        linestyle=("--" if line.dashed else "-") if line.joined else "none",
        marker="o" if line.marked else None,
        markersize=4,
        linewidth=1.6,
    )
    for x, y, label in zip(line.x, line.y, line.labels, strict=False):
        axes.annotate(label, (x, y), xytext=(4, 4), textcoords="offset points", color=color, fontsize=7)
