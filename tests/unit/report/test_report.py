"""Tables, plots and pages: what goes in comes out, escaped, and the same every time."""

import csv
import io
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from kvspan.errors import ConfigError
from kvspan.report.page import Code, Heading, Plots, Text, page, write_text
from kvspan.report.plots import Line, Plot, save, svg
from kvspan.report.table import TextTable, csv_text, number, share

PLOT = Plot(
    title="Front & back",
    x_label="tok/s",
    y_label="tok/s",
    lines=[
        Line(name="-tp 4 -dcp 4", x=[1, 2], y=[3.0, 4.0], labels=["a", "b"]),
        Line(name="", x=[1, 2], y=[2.0, 1.0], dashed=True, color=1),
        Line(name="empty", x=[], y=[]),
    ],
    log_x=True,
)


def test_an_svg_is_one_element_and_the_same_each_time() -> None:
    drawn = svg(PLOT)
    assert ElementTree.fromstring(drawn).tag.endswith("svg")
    assert "-tp 4 -dcp 4" in drawn
    assert svg(PLOT) == drawn


def test_plots_are_saved(tmp_path: Path) -> None:
    save(PLOT, tmp_path / "plot.png")
    save(PLOT, tmp_path / "plot.svg")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "plot.svg").read_text().rstrip().endswith("</svg>")
    with pytest.raises(ConfigError, match=r"not .*plot\.pdf"):
        save(PLOT, tmp_path / "plot.pdf")
    with pytest.raises(ConfigError, match="cannot be written"):
        save(PLOT, tmp_path / "none" / "plot.png")


def test_a_page_holds_its_parts_and_nothing_from_elsewhere(tmp_path: Path) -> None:
    table = TextTable("A table", ("", "figure"), [("<b>", "1")])
    html = page(
        "R & D", [Heading("One"), Text("a < b"), Code("kvspan bench"), table, Plots([PLOT, PLOT])]
    )
    for text in ("<h1>R &amp; D</h1>", "<h2>One</h2>", "a &lt; b", "<td>&lt;b&gt;</td>", "<pre>kvspan"):
        assert text in html
    assert html.count("<svg") == 2
    assert not {
        value for name, value in _attributes(html) if name in ("src", "href") and value[:1] != "#"
    }
    write_text(html, tmp_path / "page.html")
    assert (tmp_path / "page.html").read_text() == html
    with pytest.raises(ConfigError, match="cannot be written"):
        write_text(html, tmp_path)


def test_a_csv_can_be_read_back() -> None:
    rows = [["a,b", 1, None], ['"', 2.5, "x\ny"]]
    assert list(csv.reader(io.StringIO(csv_text(["n", "x", "y"], rows)))) == [
        ["n", "x", "y"],
        ["a,b", "1", ""],
        ['"', "2.5", "x\ny"],
    ]


def test_what_was_not_measured_is_a_dash() -> None:
    assert (number(None), share(None)) == ("-", "-")
    assert (number(1234.56), number(1234.56, 0), share(0.125)) == ("1,234.6", "1,235", "12.5%")


def _attributes(html: str) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []

    class Parser(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            found.extend((name.split(":")[-1], value or "") for name, value in attrs)

    Parser().feed(html)
    return found
