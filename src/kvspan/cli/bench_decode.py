"""`kvspan bench decode`: steady-state decoding, in as many layouts as are to be compared."""

import argparse
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from kvspan.bench.contender import Case
from kvspan.bench.decode import Decoded, Plan, measure
from kvspan.cli.bounds import refuse_below
from kvspan.cli.flags import add_engine_flags, engine_config, layout_flags
from kvspan.cli.json_flag import JsonOutput, add_json_flag
from kvspan.cli.startup import stderr_console
from kvspan.config.cores import num_cores
from kvspan.config.engine import EngineConfig
from kvspan.config.sizes import parse_count
from kvspan.errors import ConfigError

_WIDTH = 110
"""Columns that the table needs, whatever a pipe is taken to have."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the subject's arguments."""
    parser.add_argument("--context", default="512,4096", help="tokens of each prompt (512,4096)")
    parser.add_argument("--batch", default="1,8", help="sequences (1,8)")
    parser.add_argument(
        "--cases", metavar="CONTEXT:BATCH,...", help="pairs, instead of each --context with each --batch"
    )
    parser.add_argument(
        "--layout",
        action="append",
        default=[],
        metavar="'-tp 2 -dcp 2 ...'",
        help="flags of a layout; several are measured by turns, and compared with the first",
    )
    parser.add_argument("--steps", type=int, default=32, help="that count, in a round (32)")
    parser.add_argument("--rounds", type=int, default=3, help="of each case and layout (3)")
    parser.add_argument("--breakdown", action="store_true", help="tell what a step is spent on")
    add_json_flag(parser)
    add_engine_flags(parser, positional_model=True)


def run(arguments: argparse.Namespace) -> int:
    """Runs the subject."""
    refuse_below(("--steps", arguments.steps, 1), ("--rounds", arguments.rounds, 1))
    json = JsonOutput(arguments)
    plan = Plan(_cases(arguments), arguments.steps, arguments.rounds, arguments.breakdown)
    quiet = stderr_console()
    results = []
    console = Console(highlight=False, quiet=json.is_alone)
    console.width = max(console.width, _WIDTH)
    for decoded in measure(
        _layouts(arguments, plan), plan, told=lambda what: quiet.print(what, style="dim", markup=False)
    ):
        results += decoded
        _print(console, decoded)
    json.write({"cores": num_cores(), "steps": plan.num_steps, "results": results})
    return 0


def _cases(arguments: argparse.Namespace) -> tuple[Case, ...]:
    if arguments.cases is None:
        contexts = _counts("--context", arguments.context, least=2)
        batches = _counts("--batch", arguments.batch, least=1)
        return tuple(Case(context, batch) for context in contexts for batch in batches)
    pairs = [pair.split(":") for pair in arguments.cases.split(",")]
    if any(len(pair) != 2 for pair in pairs):
        raise ConfigError(f"--cases {arguments.cases} is no list of CONTEXT:BATCH such as 512:8,32k:4.")
    return tuple(
        Case(*_counts("--cases", context, least=2), *_counts("--cases", batch, least=1))
        for context, batch in pairs
    )


def _counts(flag: str, text: str, *, least: int) -> list[int]:
    try:
        counts = [parse_count(part) for part in text.split(",")]
    except ValueError as error:
        raise ConfigError(f"{flag} {text}: {error}.") from None
    if min(counts) < least:
        raise ConfigError(f"{flag} {text}: {min(counts)} is too small, {least} or more.")
    return counts


def _layouts(arguments: argparse.Namespace, plan: Plan) -> list[tuple[str, EngineConfig]]:
    """Names and options: those of the command line, and over them those of each layout."""
    common, found = vars(arguments), []
    for text in arguments.layout or [""]:
        own = layout_flags(text, command="kvspan bench decode")
        asked = argparse.Namespace(**{**common, **own})
        found.append((text, engine_config(asked, defaults=plan.options)))
    return found


def _print(console: Console, decoded: Sequence[Decoded]) -> None:
    first = decoded[0]
    title = f"Context {first.context:,}, batch {first.batch}"
    table = Table("layout", title=title, title_justify="left")
    for name in (
        "tok/s",
        "ms a step",
        "p10",
        "p90",
        "MB read",
        "GB/s",
        "of memory",
        "/ first",
        "worst",
    ):
        table.add_column(name, justify="right")
    for d in decoded:
        table.add_row(
            d.layout,
            f"{d.tokens_per_s:,.1f}",
            f"{d.median_ms:.2f}",
            f"{d.p10_ms:.2f}",
            f"{d.p90_ms:.2f}",
            f"{d.bytes_per_step / 1e6:,.1f}",
            f"{d.bytes_per_step / d.median_ms / 1e6:.1f}",
            f"{d.bandwidth_share:.0%}",
            f"{d.ratio:.2f}",
            f"{d.worst_ratio:.2f}",
        )
    console.print(table)
    if first.breakdown_ms:
        console.print(_breakdown(decoded))


def _breakdown(decoded: Sequence[Decoded]) -> Table:
    table = Table("ms a step of rank 0, watched", *(d.layout for d in decoded))
    for name in sorted(decoded[0].breakdown_ms, key=lambda name: -decoded[0].breakdown_ms[name]):
        table.add_row(name, *(f"{d.breakdown_ms.get(name, 0.0):.2f}" for d in decoded))
    table.add_row("all", *(f"{sum(d.breakdown_ms.values()):.2f}" for d in decoded))
    return table
