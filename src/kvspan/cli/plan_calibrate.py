"""`kvspan plan calibrate`: this host as a row of facts."""

import argparse
import re
import sys

from kvspan.bench.calibrate import as_toml, calibrate
from kvspan.cli.startup import stderr_console
from kvspan.comm.shm import refusal
from kvspan.errors import ConfigError
from kvspan.report.page import check_places, write_text

MAX_RANKS = 64


def run(arguments: argparse.Namespace) -> int:
    """Runs the command."""
    if not 1 <= arguments.ranks <= MAX_RANKS:
        raise ConfigError(f"--ranks {arguments.ranks} is not a number of ranks from 1 to {MAX_RANKS}.")
    if not re.fullmatch(r"[\w.-]+", arguments.name):
        raise ConfigError(f"--name {arguments.name} is no name: letters, digits, dots and dashes.")
    if (why := refusal()) is not None:
        raise ConfigError(f"Ranks of this host cannot meet: {why}.")
    if arguments.json is not None:
        raise ConfigError("--json has nothing to do with calibrate: --write FILE.toml takes its row.")
    check_places(arguments.write)
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
    write_text(row, arguments.write)
    console.print(
        f"{arguments.write}: use it with --facts {arguments.write} --hardware {arguments.name}",
        markup=False,
    )
    return 0
