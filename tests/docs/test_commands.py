"""Every command and every flag in README.md and docs/ is one that the command line takes.

Lines of `kvspan ...` in blocks of code are read by the real parser, and nothing is run. Commands in
prose may leave out what is required.
"""

import argparse
import importlib
import re
import shlex
from functools import cache
from pathlib import Path

import pytest

from kvspan.cli.flags import FlagParser, engine_config
from kvspan.cli.main import COMMANDS
from kvspan.errors import ConfigError
from tests.docs.pages import PAGES, ROOT, blocks, spans

LINES = [
    pytest.param(line, id=f"{block}-{line[:40]}")
    for page in PAGES
    for block in blocks(page)
    for line in block.commands()
]
BENCHMARKS = "\n".join(script.read_text() for script in (ROOT / "benchmarks").glob("*.py"))


def parser_of(command: str) -> FlagParser:
    parser = FlagParser(prog=f"kvspan {command}")
    importlib.import_module(f"kvspan.cli.{command}").add_arguments(parser)
    return parser


def parse(line: str) -> argparse.Namespace:
    _, command, *arguments = shlex.split(line, comments=True)
    assert command in COMMANDS, line
    return parser_of(command).parse_args(arguments)


def refusal_of(line: str) -> str | None:
    try:
        parse(line)
    except SystemExit:  # after --help
        return None
    except ConfigError as refusal:
        return str(refusal)
    return None


@cache
def flags_of(command: str) -> frozenset[str]:
    """The flags of a command and of its subjects."""
    found: set[str] = set()
    waiting: list[argparse.ArgumentParser] = [parser_of(command)]
    while waiting:
        parser = waiting.pop()
        found |= parser._option_string_actions.keys()
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                waiting += action.choices.values()
    return frozenset(found)


def test_there_are_commands_to_read() -> None:
    assert len(LINES) > 10


@pytest.mark.parametrize("line", LINES)
def test_a_command_is_one_that_the_parser_takes(line: str) -> None:
    parsed = parse(line)
    if "config" in vars(parsed):
        engine_config(parsed, defaults={"model": "some-model"})  # the values too


@pytest.mark.parametrize("line", ["kvspan serve m --no-such-flag", "kvspan bench decode m --context"])
def test_a_wrong_one_would_be_seen(line: str) -> None:
    with pytest.raises(ConfigError):
        parse(line)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_in_prose_exist(page: Path) -> None:
    wrong = {span: refusal_of(span) for span in spans(page) if span.startswith("kvspan ")}
    assert not {span: why for span, why in wrong.items() if why and "are required" not in why}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_flags_in_prose_exist(page: Path) -> None:
    is_about_the_server_alone = page.name in ("api.md", "serving.md")
    known = flags_of("serve").union(*map(flags_of, [] if is_about_the_server_alone else COMMANDS))
    named = {flag for span in spans(page) for flag in re.findall(r"(?<![\w-])--[a-z][\w-]*", span)}
    assert not {flag for flag in named - known if f'"{flag}"' not in BENCHMARKS}
