"""`kvspan trace`: what a trace asks for, traces that are made up, and parts of traces."""

import argparse
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from kvspan.cli.bounds import refuse_below
from kvspan.cli.json_flag import JsonOutput, add_json_flag
from kvspan.cli.startup import stderr_console
from kvspan.cli.trace_flags import add_trace_flags, read_options
from kvspan.errors import ConfigError
from kvspan.trace.cut import Cut, cut_trace, scaled
from kvspan.trace.mooncake import read_trace, write_trace
from kvspan.trace.row import Trace
from kvspan.trace.stats import Spread, TraceStats, trace_stats
from kvspan.trace.synth import PROFILES, synthesize

_SCALE_HELP = "divide lengths and --trace-block-size by this, which must divide the latter (1)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's subjects and their arguments."""
    subjects = parser.add_subparsers(
        dest="subject", required=True, metavar="SUBJECT", prog="kvspan trace"
    )
    for name, what, add in (
        ("stats", "lengths, and how much of the prompts a prefix cache could find", _add_stats),
        ("synth", "make a trace with the statistics of observed ones", _add_synth),
        ("cut", "write a part of a trace, or one with shorter rows", _add_cut),
    ):
        usage = f"kvspan trace {name} [options]"
        add(subjects.add_parser(name, help=what, description=f"{what}.", usage=usage))


def run(arguments: argparse.Namespace) -> int:
    """Runs the command."""
    return {"stats": _stats, "synth": _synth, "cut": _cut}[arguments.subject](arguments)


def _add_stats(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, metavar="FILE", help="a trace, gzip-compressed or not")
    parser.add_argument(
        "--hit-unit", type=int, default=16, help="tokens in which a cache finds prefixes again (16)"
    )
    parser.add_argument(
        "--scale", type=int, default=1, help="what the trace was scaled by: the buckets are too (1)"
    )
    add_json_flag(parser)
    add_trace_flags(parser)


def _add_synth(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--profile", default="agentic", help=f"what it is to look like: {', '.join(PROFILES)} (agentic)"
    )
    parser.add_argument("--rows", type=int, default=1000, help="requests (1000)")
    parser.add_argument("--rate", type=float, default=1.0, help="requests a second, on average (1)")
    parser.add_argument("--seed", type=int, default=0, help="fixes the trace (0)")
    parser.add_argument(
        "--scale", type=int, default=1, help="divide lengths and blocks of 512 by it (1)"
    )
    parser.add_argument(
        "--output-scale", type=int, default=None, help="divide output lengths by it (--scale)"
    )
    _add_output(parser)


def _add_cut(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, metavar="FILE", help="a trace, gzip-compressed or not")
    parser.add_argument("--skip", type=int, default=0, help="rows to leave out at the beginning (0)")
    parser.add_argument("--rows", type=int, default=None, help="rows to keep at the most (all)")
    parser.add_argument("--start", type=float, default=0.0, help="seconds from the first row (0)")
    parser.add_argument("--end", type=float, default=None, help="seconds from the first row (none)")
    parser.add_argument(
        "--max-input", type=int, default=None, help="leave out rows with longer prompts (none)"
    )
    parser.add_argument("--max-output", type=int, default=None, help="cut outputs to it (none)")
    parser.add_argument("--scale", type=int, default=1, help=_SCALE_HELP)
    _add_output(parser)
    add_trace_flags(parser)


def _add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("-"),
        metavar="FILE",
        help="where to write it; .gz compresses (stdout)",
    )


def _stats(arguments: argparse.Namespace) -> int:
    json = JsonOutput(arguments)
    refuse_below(("--hit-unit", arguments.hit_unit, 1), ("--scale", arguments.scale, 1))
    trace = read_trace(arguments.file, read_options(arguments))
    stats = trace_stats(trace, hit_unit=arguments.hit_unit, scale=arguments.scale)
    read = {"skipped": trace.num_skipped, "unsorted": trace.num_unsorted}
    json.write(msgspec.to_builtins(stats) | read)
    _print(Console(highlight=False, quiet=json.is_alone), trace, stats)
    return 0


def _synth(arguments: argparse.Namespace) -> int:
    refuse_below(("--seed", arguments.seed, 0))
    if (profile := PROFILES.get(arguments.profile)) is None:
        raise ConfigError(f"--profile {arguments.profile} is unknown: there is {', '.join(PROFILES)}.")
    trace = synthesize(profile, num_rows=arguments.rows, rate_per_s=arguments.rate, seed=arguments.seed)
    _write(scaled(trace, scale=arguments.scale, output_scale=arguments.output_scale), arguments.output)
    return 0


def _cut(arguments: argparse.Namespace) -> int:
    _refuse_same(arguments.file, arguments.output)
    refuse_below(
        ("--skip", arguments.skip, 0),
        ("--rows", arguments.rows, 1),
        ("--start", arguments.start, 0),
        ("--end", arguments.end, 0),
        ("--max-input", arguments.max_input, 1),
        ("--max-output", arguments.max_output, 1),
    )
    cut = Cut(
        skip=arguments.skip,
        rows=arguments.rows,
        start_s=arguments.start,
        end_s=arguments.end,
        max_input=arguments.max_input,
        max_output=arguments.max_output,
        scale=arguments.scale,
    )
    _write(cut_trace(read_trace(arguments.file, read_options(arguments)), cut), arguments.output)
    return 0


def _refuse_same(file: Path, output: Path) -> None:
    """Refuses to write a part of a trace over the whole, by whatever name."""
    if output.exists() and file.exists() and output.samefile(file):
        raise ConfigError(f"--output {output} is the trace that is cut: name another file.")


def _write(trace: Trace, path: Path) -> None:
    write_trace(trace.rows, path)
    tokens = sum(row.input_length for row in trace.rows)
    stderr_console().print(
        f"{len(trace.rows):,} rows, {tokens:,} input tokens; read it with "
        f"--trace-block-size {trace.block_tokens}",
        style="dim",
    )


def _print(console: Console, trace: Trace, stats: TraceStats) -> None:
    console.print(
        f"{stats.num_rows:,} rows over {stats.duration_s:,.0f} s ({stats.requests_per_s:.2f} a second); "
        f"{trace.num_skipped} bad lines skipped, {trace.num_unsorted} rows out of order."
    )
    lengths = Table("tokens", title="Lengths", title_justify="left")
    for name in ("mean", "median", "p90", "p99", "longest"):
        lengths.add_column(name, justify="right")
    lengths.add_row("input", *_figures(stats.input_tokens))
    lengths.add_row("output", *_figures(stats.output_tokens))
    console.print(lengths)
    buckets = Table("input", title="Rows by length of input", title_justify="left")
    for name in ("rows", "of rows", "of input tokens"):
        buckets.add_column(name, justify="right")
    for each in stats.buckets:
        shares = (f"{each.rows_share:.1%}", f"{each.tokens_share:.1%}")
        buckets.add_row(each.bucket, f"{each.num_rows:,}", *shares)
    console.print(buckets)
    console.print(
        f"{stats.total_input_tokens:,} input tokens, {stats.unique_input_tokens:,} of them unique: each "
        f"{stats.reuse:.2f} times. A cache of any size, with hits in units of {stats.hit_unit} tokens, "
        f"finds {stats.ideal_hit_rate:.1%}."
    )


def _figures(spread: Spread) -> tuple[str, ...]:
    return tuple(
        f"{value:,.0f}" for value in (spread.mean, spread.p50, spread.p90, spread.p99, spread.max)
    )
