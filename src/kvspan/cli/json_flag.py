"""`--json`, which every command with figures understands alike. Knows no figures.

Alone it prints one JSON object to stdout, and nothing else goes there. With a file it writes the object
into that, and the command prints what it prints without the flag. `FlagParser` tells a file from the
command's own arguments.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import msgspec

from kvspan.report.page import check_places, write_text

STDOUT = "-"
HELP = (
    "print one JSON object to stdout and nothing else; with FILE.json, write it there and print as ever "
    "(a file of another name: --json=FILE)"
)


def add_json_flag(group: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Adds the flag to a command, or to a group of its flags."""
    group.add_argument("--json", nargs="?", const=STDOUT, metavar="FILE.json", help=HELP)


class JsonOutput:
    """Where a command's object goes, if anywhere.

    Args:
        arguments: parsed by a parser that has the flag.

    Raises:
        ConfigError: the file cannot be written, before anything is measured.
    """

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._place: str | None = arguments.json
        if self._place not in (None, STDOUT):
            check_places(Path(self._place))

    @property
    def is_alone(self) -> bool:
        """Whether stdout takes the object and nothing else."""
        return self._place == STDOUT

    def write(self, found: Any) -> None:
        """Writes what was found, if it is asked for.

        Args:
            found: of types that msgspec encodes.
        """
        if self._place is None:
            return
        text = msgspec.json.encode(found).decode() + "\n"
        sys.stdout.write(text) if self.is_alone else write_text(text, Path(self._place))
