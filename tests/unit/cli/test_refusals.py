"""Nonsense on the command line ends in one sentence and exit 2, before anything runs."""

from itertools import pairwise

import pytest

from kvspan.cli.main import main
from kvspan.config.engine import ENGINE_OPTIONS
from kvspan.config.options import Option
from kvspan.config.server import SERVER_OPTIONS

DECODE, ELASTIC = ["bench", "decode", "nowhere"], ["bench", "elastic", "nowhere"]
SWEEP = ["bench", "sweep", "nowhere", "--trace", "nothing"]


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ([*DECODE, "--layout", '-tp "2'], '--layout -tp "2 cannot be read: no closing quotation.'),
        ([*ELASTIC, "--layout", "-tp '2"], "--layout -tp '2 cannot be read: no closing quotation."),
        ([*DECODE, "--layout", "-tp"], "(see `kvspan bench decode --help`)"),
        ([*DECODE, "--cases", "64"], "--cases 64 is no list of CONTEXT:BATCH"),
        ([*DECODE, "--cases", "64:1:2"], "--cases 64:1:2 is no list of CONTEXT:BATCH"),
        ([*ELASTIC, "--scale", "0"], "--scale 0 is too small: 1 or more."),
        ([*ELASTIC, "--output-scale", "-1"], "--output-scale -1 is too small: 1 or more."),
        ([*ELASTIC, "--context", "0", "--trace", "none"], "--trace none leave nothing to measure"),
        ([*DECODE, "--json", "/no/x.json"], "/no/x.json cannot be written: there is no directory /no."),
        ([*ELASTIC, "--svg", "/no/x.svg"], "/no/x.svg cannot be written: there is no directory /no."),
        (["bench", "serve", "m", "--trace", "t", "--csv", "/no/x"], "there is no directory /no."),
        (["plan", "calibrate", "--write", "/no/x.toml"], "there is no directory /no."),
        (["check", "nowhere", "-dp", "2"], "--data-parallel-size 2: replicas stand behind a server"),
        ([*DECODE, "-dp", "2"], "--data-parallel-size 2: replicas stand behind a server"),
        ([*DECODE, "--layout", "-dp 2"], "--data-parallel-size 2: replicas stand behind a server"),
        ([*ELASTIC, "--layout", "-dp 2"], "--data-parallel-size 2: replicas stand behind a server"),
        (["bench", "sweep", "nowhere"], "(see `kvspan bench sweep --help`)"),
        (["generate", "nowhere", "--prompt", "x", "--chat", "--chat-template", "no"], "template no"),
        (["serve", "nowhere", "--chat-template", "no"], "--chat-template no cannot be read"),
        (["trace", "stats"], "(see `kvspan trace stats --help`)"),
        (["plan", "kimi-k2.6", "--hardware", "nonsense"], "there are A100-SXM, H100-SXM"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_nonsense_is_refused(line: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(line) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize("table", [ENGINE_OPTIONS, SERVER_OPTIONS], ids=["engine", "server"])
def test_each_heading_of_the_help_stands_once(table: tuple[Option, ...]) -> None:
    groups = [option.group for option in table]
    changes = [a for a, b in pairwise(groups) if a != b] + groups[-1:]
    assert len(changes) == len(set(changes))
