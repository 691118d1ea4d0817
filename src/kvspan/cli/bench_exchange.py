"""`kvspan bench exchange`: how long ranks take to exchange on this machine."""

import argparse
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from kvspan.bench.exchange import COMMS, HEAD_DIM, OPS, Timing, measure
from kvspan.cli.bounds import refuse_below
from kvspan.cli.json_flag import JsonOutput, add_json_flag
from kvspan.comm.shm import refusal
from kvspan.config.cores import num_cores
from kvspan.config.sizes import format_bytes
from kvspan.errors import ConfigError

MAX_RANKS = 64
"""Each is a process; what does not fit a host's memory would end it, and not be refused."""

SIZES_BYTES = tuple(1 << shift for shift in range(10, 21, 2))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the subject's arguments."""
    parser.add_argument("--ranks", type=int, default=2, help="processes (2)")
    parser.add_argument("--rounds", type=int, default=200, help="of each operation and size (200)")
    add_json_flag(parser)


def run(arguments: argparse.Namespace) -> int:
    """Runs the subject."""
    refuse_below(("--ranks", arguments.ranks, 2), ("--rounds", arguments.rounds, 1))
    if arguments.ranks > MAX_RANKS:
        raise ConfigError(f"--ranks {arguments.ranks} is too many: {MAX_RANKS} or fewer.")
    if (why := refusal()) is not None:
        raise ConfigError(f"There is nothing to compare gloo with: {why}.")
    json = JsonOutput(arguments)
    timings = measure(arguments.ranks, SIZES_BYTES, arguments.rounds)
    cores = num_cores()
    json.write({"ranks": arguments.ranks, "cores": cores, "dtype": "bfloat16", "timings": timings})
    where = f"{arguments.ranks} ranks on {cores} cores"
    _print(Console(highlight=False, quiet=json.is_alone), timings, where)
    return 0


def _print(console: Console, timings: Sequence[Timing], where: str) -> None:
    table = Table("", "a rank brings", title=f"Microseconds, {where}, bfloat16", title_justify="left")
    for name in ("shm played", "shm median", "p99", "gloo median", "p99", "gloo / shm"):
        table.add_column(name, justify="right")
    found = {(t.op, t.size_bytes, t.comm, t.played): t for t in timings}
    for op in OPS:
        for size in SIZES_BYTES:
            shm, gloo = (found[op, size, comm, False] for comm in COMMS)
            played = found[op, size, "shm", True]
            figures = (played.median_us, shm.median_us, shm.p99_us, gloo.median_us, gloo.p99_us)
            ratio = f"{gloo.median_us / shm.median_us:.1f}"
            table.add_row(op, format_bytes(size), *(f"{us:,.1f}" for us in figures), ratio)
        table.add_section()
    console.print(table)
    console.print(
        f"merge: partial attention of one row with heads of {HEAD_DIM}, and its LSEs; "
        "played: with no Python between collectives, as in recorded decode steps",
        style="dim",
    )
