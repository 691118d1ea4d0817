"""`kvspan plan calibrate`: this host as a row of facts."""

import argparse
import re
import sys

from kvspan.bench.calibrate import as_toml, calibrate
from kvspan.cli.startup import stderr_console
from kvspan.comm.shm import refusal
from kvspan.errors import ConfigError

MAX_RANKS = 64


def run(arguments: argparse.Namespace) -> int:
    """Runs the command."""
    if not 1 <= arguments.ranks <= MAX_RANKS:
        raise ConfigError(f"--ranks {arguments.ranks} is not a number of ranks from 1 to {MAX_RANKS}.")
    if not re.fullmatch(r"[\w.-]+", arguments.name):
        raise ConfigError(f"--name {arguments.name} is no name: letters, digits, dots and dashes.")
    if (why := refusal()) is not None:
        raise ConfigError(f"Ranks of this host cannot meet: {why}.")
    console = stderr_console()
    device = calibrate(
        arguments.name,
        arguments.ranks,
        told=lambda what: console.print(what, style="dim", markup=False),
    )
    row = as_toml(device)
    if arguments.write is None:
        sys.stdout.write(row)
        return 0
    try:
        arguments.write.write_text(row, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--write {arguments.write} cannot be written: {error.strerror}.") from None
    console.print(
        f"{arguments.write}: use it with --facts {arguments.write} --hardware {arguments.name}",
        markup=False,
    )
    return 0
