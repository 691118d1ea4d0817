"""The options of an engine as command-line flags. Knows argparse; knows no command.

A flag's value is kept as the text that was typed and a flag that was not typed is not there at all, so
the readers of `config.options` see what they would see in a file, and typed flags win over the file.
"""

import argparse
import re
import shlex
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NoReturn

from kvspan.config.absent import refuse_unknown
from kvspan.config.engine import ENGINE_OPTIONS, OF_SERVERS, EngineConfig, read_yaml
from kvspan.config.options import Option, as_flag, canonical
from kvspan.errors import ConfigError

_NUMBERS = {"int": "a whole number", "float": "a number"}
"""What types are called by those who type."""


class FlagParser(argparse.ArgumentParser):
    """A parser that refuses with a `ConfigError`: one sentence, for the command to print and exit 2.

    Flags may be spelled with underscores, and must be spelled out.
    """

    def parse_known_args(  # also what a parser of commands calls on the command's own parser
        self, args: Iterable[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Like the parser it extends, but nothing is left over.

        Raises:
            ConfigError: a flag is unknown, lacks its value, or has one too many.
        """
        self.allow_abbrev = False
        typed = _with_dashes(sys.argv[1:] if args is None else list(args))
        if "--json" in self._option_string_actions:
            typed = _with_json(typed)
        found, left = super().parse_known_args(typed, namespace)
        for text in left:
            if text.startswith("-") and text != "--":
                raise refuse_unknown(text.split("=")[0], list(self._option_string_actions))
        if left:
            raise ConfigError(
                f"Unexpected argument {left[0]}: {_hint(typed, left[0])}see `{self.prog} --help`."
            )
        return found, []

    def _get_option_tuples(self, _: str) -> list[Any]:
        """No flag is guessed from its beginning, as argparse does with `-t 8` even if told not to."""
        return []

    def error(self, message: str) -> NoReturn:
        """Refuses what argparse refuses."""
        wrong = re.fullmatch(r"argument (?:\S+/)?(\S+): invalid (int|float) value: '(.*)'", message)
        if wrong is not None:
            flag, kind, value = wrong.groups()
            raise ConfigError(f"{flag} {value} is not {_NUMBERS[kind]} (see `{self.prog} --help`).")
        raise ConfigError(f"{message[:1].upper()}{message[1:]} (see `{self.prog} --help`).")


def add_engine_flags(
    parser: argparse.ArgumentParser, *, positional_model: bool = False, serves: bool = False
) -> None:
    """Adds every option of an engine, under its heading, and `--config FILE.yaml`.

    Args:
        parser: of a command.
        positional_model: whether the model may also be named without `--model`.
        serves: whether the help tells of what only a server can have; others refuse it when it is typed.
    """
    if positional_model:
        parser.add_argument(
            "model", nargs="?", default=argparse.SUPPRESS, metavar="MODEL", help="the same as --model"
        )
    parser.add_argument(
        "--config", metavar="FILE.yaml", type=Path, help="options in a file; typed ones win over it"
    )
    add_flags(parser, ENGINE_OPTIONS, untold=() if serves else OF_SERVERS)


def add_flags(
    parser: argparse.ArgumentParser, table: Sequence[Option], *, untold: Collection[str] = ()
) -> None:
    """Adds options, under their headings.

    Args:
        parser: of a command.
        table: in the order of `--help`; neighbours of one group share its heading.
        untold: names of those that the help leaves out.
    """
    for heading, options in groupby(table, key=lambda option: option.group):
        group = parser.add_argument_group(heading)
        for option in options:
            _add_flag(group, option, is_told=option.name not in untold)


def engine_config(
    arguments: argparse.Namespace, *, defaults: Mapping[str, Any] | None = None
) -> EngineConfig:
    """What a command line asks of one engine, together with its `--config` file.

    Args:
        arguments: parsed by a parser that `add_engine_flags` has extended; more may be in it.
        defaults: options of the command itself, which both win over.

    Raises:
        ConfigError: an option is unknown, a value is not one that it takes, or there are replicas.
    """
    config = EngineConfig.from_mapping({**(defaults or {}), **asked_of(arguments, ENGINE_OPTIONS)})
    config.refuse_replicas()
    return config


def asked_of(
    arguments: argparse.Namespace, table: Sequence[Option], *, beside: Sequence[Option] = ()
) -> dict[str, Any]:
    """What a command line and its `--config` file ask of some options, by name; typed ones win.

    Args:
        arguments: parsed by a parser with these options and `--config`.
        table: the options.
        beside: further ones that may stand in the file.

    Raises:
        ConfigError: the file has an option that is neither in the table nor beside it.
    """
    typed = vars(arguments)
    file = read_yaml(typed["config"]) if typed["config"] is not None else {}
    found = {**canonical(file, [*table, *beside]), **typed}
    return {option.name: found[option.name] for option in table if option.name in found}


def layout_flags(text: str, *, command: str) -> dict[str, Any]:
    """What the text of a `--layout` asks, by name of the option.

    Args:
        text: flags of an engine, as a shell reads them: "-tp 2 -dcp 2".
        command: whose help tells of them.

    Raises:
        ConfigError: a flag is unknown or lacks its value, or a quotation is left open.
    """
    parser = FlagParser(prog=command, add_help=False)
    add_engine_flags(parser)
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"--layout {text} cannot be read: {str(error).lower()}.") from None
    typed = vars(parser.parse_args(words))
    return {name: value for name, value in typed.items() if value is not None}


def _add_flag(group: argparse._ArgumentGroup, option: Option, *, is_told: bool) -> None:
    spellings = [*([option.short] if option.short else []), option.flag]
    spellings += [as_flag(alias) for alias in option.aliases]
    shown = f"{option.help} (default: {option.shown_default})".replace("%", "%%")
    told = shown if is_told else argparse.SUPPRESS
    if option.kind.switch:
        group.add_argument(
            *spellings,
            dest=option.name,
            action=argparse.BooleanOptionalAction,
            default=argparse.SUPPRESS,
            help=told,
        )
        return
    group.add_argument(
        *spellings,
        dest=option.name,
        default=argparse.SUPPRESS,
        metavar=option.kind.metavar,
        nargs="?" if option.kind.bare else None,
        const=option.kind.bare,
        help=told,
    )


def _with_dashes(arguments: Sequence[str]) -> list[str]:
    """`--a_b=c_d` as `--a-b=c_d`, up to a lone `--`."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    flags = [_dashed(text) if text.startswith("--") else text for text in arguments[:end]]
    return flags + list(arguments[end:])


def _with_json(arguments: Sequence[str]) -> list[str]:
    """`--json` with its value: a file behind it ends in .json, and else it is alone.

    Any other argument behind it, such as a model, is the command's own.
    """
    end = arguments.index("--") if "--" in arguments else len(arguments)
    found: list[str] = []
    for before, text in zip(["", *arguments], arguments[:end], strict=False):
        if before == "--json" and (text == "-" or text.endswith(".json")):
            found[-1] = f"--json={text}"
        else:
            found.append("--json=-" if text == "--json" else text)
    return found + list(arguments[end:])


def _hint(arguments: Sequence[str], unexpected: str) -> str:
    """What whoever typed an argument too many may have meant."""
    before = dict(zip(arguments[1:], arguments, strict=False)).get(unexpected)
    if before != "--json=-":
        return ""
    return f"a file for --json ends in .json, or is written --json={unexpected}; "


def _dashed(flag: str) -> str:
    name, equals, value = flag.partition("=")
    return name.replace("_", "-") + equals + value
