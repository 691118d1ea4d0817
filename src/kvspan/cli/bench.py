"""`kvspan bench`: how fast parts of the engine are here. Each subject has a file of its own."""

import argparse
import importlib
from types import ModuleType

SUBJECTS = {
    "decode": "steady-state decoding with the whole engine, by context, batch and layout",
    "elastic": "a span for each request beside replicas and a span for all: by context, under traffic",
    "exchange": "collectives between ranks of this host, over shared memory and gloo",
    "serve": "a trace replayed against a server, or on an engine of this process",
    "sweep": "a trace replayed by layout and concurrency: tables and the Pareto front",
}
"""Subject -> what is measured; each is the module `bench_` and that name."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's subjects and their arguments."""
    subjects = parser.add_subparsers(
        dest="subject", required=True, metavar="SUBJECT", prog="kvspan bench"
    )
    for name, what in SUBJECTS.items():
        usage = f"kvspan bench {name} [options]"
        subject = subjects.add_parser(name, help=what, description=f"{what}.", usage=usage)
        vars(_module(name))["add_arguments"](subject)


def run(arguments: argparse.Namespace) -> int:
    """Runs the subject that was named."""
    return int(vars(_module(arguments.subject))["run"](arguments))


def _module(subject: str) -> ModuleType:
    return importlib.import_module(f"kvspan.cli.bench_{subject}")
