"""`--json` is one rule for every command that has it."""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvspan.cli.flags import FlagParser
from kvspan.cli.json_flag import HELP, JsonOutput, add_json_flag
from kvspan.cli.main import COMMANDS, _module, _parser, main
from kvspan.errors import ConfigError

PLAN = [
    "plan",
    "kimi-k2.6",
    "--hardware",
    "B200-SXM",
    "--gpus",
    "8",
    "--input",
    "67k",
    "--output",
    "400",
]


def parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for its in action.choices.values():
                yield from parsers(its)


def typed(*line: str) -> argparse.Namespace:
    parser = FlagParser(prog="kvspan it")
    parser.add_argument("model", nargs="?")
    add_json_flag(parser)
    return parser.parse_args(line)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_the_same_flag(command: str) -> None:
    for parser in parsers(_parser(_module([command]))):
        action = parser._option_string_actions.get("--json")
        assert action is None or (action.help, action.nargs) == (HELP, "?"), parser.prog


@pytest.mark.parametrize(
    ("line", "model", "place"),
    [
        (["m"], "m", None),
        (["m", "--json"], "m", "-"),
        (["--json", "m"], "m", "-"),
        (["--json", "-", "m"], "m", "-"),
        (["m", "--json", "x.json"], "m", "x.json"),
        (["--json", "x.json", "m"], "m", "x.json"),
        (["--json=x.txt", "m"], "m", "x.txt"),
        (["--json=-", "m.json"], "m.json", "-"),
        (["--json", "--", "m.json"], "m.json", "-"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else f"{value}",
)
def test_what_stands_behind_it(line: list[str], model: str, place: str | None) -> None:
    found = typed(*line)
    assert (found.model, found.json) == (model, place)


def test_a_file_of_another_name_is_told_how_it_is_written() -> None:
    with pytest.raises(ConfigError, match=r"x\.txt: a file for --json ends in \.json, or .*=x\.txt;"):
        typed("m", "--json", "x.txt")


def test_a_file_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    for place, why in ((tmp_path / "no" / "x.json", "no directory"), (tmp_path, "is a directory")):
        with pytest.raises(ConfigError, match=why):
            JsonOutput(typed("m", f"--json={place}"))


@pytest.mark.parametrize("line", [["doctor"], PLAN], ids=lambda line: line[0])
def test_a_file_takes_what_stdout_would(
    line: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "found.json"
    assert main(line) == 0
    plain = capsys.readouterr().out
    assert main([*line, "--json"]) == 0
    alone = json.loads(capsys.readouterr().out)
    assert main([*line, "--json", str(file)]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(plain.splitlines())
    assert json.loads(file.read_text()).keys() == alone.keys()


def test_calibrate_refuses_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "calibrate", "--json"]) == 2
    assert "--write FILE.toml" in capsys.readouterr().err
