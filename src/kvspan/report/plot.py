"""Plots as SVG text. Imports matplotlib when something is drawn; knows nothing of what is drawn."""

import io
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Series:
    """Points of one kind.

    Args:
        name: for the legend; empty = none.
        x: of the points.
        y: likewise.
        line: whether they are joined.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float]
    line: bool = True


def plot_svg(
    series: Sequence[Series], *, title: str, x_label: str, y_label: str, log_x: bool = False
) -> str:
    """Draws series over one another.

    Args:
        series: what to draw, in order.
        title: above the plot.
        x_label: with its unit.
        y_label: with its unit.
        log_x: whether x is drawn by its logarithm.

    Returns:
        An `<svg>` element.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    # Ids that differ from run to run would make equal reports unequal.
    with mpl.rc_context({"svg.hashsalt": "kvspan", "svg.fonttype": "none"}):
        figure = Figure(figsize=(7.5, 4.5), layout="constrained")
        axes = figure.subplots()
        for each in series:
            style = "-o" if each.line else "o"
            axes.plot(each.x, each.y, style, label=each.name or None, markersize=3.5, linewidth=1.2)
        axes.set(title=title, xlabel=x_label, ylabel=y_label, ylim=(0, None))
        if log_x:
            axes.set_xscale("log", base=2)
        axes.grid(visible=True, alpha=0.3)
        if any(each.name for each in series):
            axes.legend(fontsize=8)
        written = io.StringIO()
        figure.savefig(written, format="svg", metadata={"Date": None})
    text = written.getvalue()
    return text[text.index("<svg") :]
