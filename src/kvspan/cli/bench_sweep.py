"""`kvspan bench sweep`: layouts by concurrency on one trace and KV budget, and their Pareto front."""

import argparse
import shlex
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from kvspan.bench.offline import Told
from kvspan.bench.sweep import Layout, SweepPlan, run_sweep
from kvspan.bench.sweep_report import pareto_plot, sweep_csv, sweep_page, sweep_table
from kvspan.cli.bounds import refuse_below, refuse_no_time
from kvspan.cli.flags import add_engine_flags, engine_config, layout_flags
from kvspan.cli.startup import stderr_console
from kvspan.cli.trace_flags import add_trace_flags, read_options
from kvspan.config.engine import EngineConfig
from kvspan.engine.build import resolve_engine
from kvspan.errors import ConfigError, LayoutError
from kvspan.report.page import write_text
from kvspan.report.plots import save
from kvspan.trace.mooncake import read_trace

_WIDTH = 150
"""Columns that the table needs, whatever a pipe is taken to have."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the subject's arguments."""
    parser.add_argument("--trace", type=Path, required=True, metavar="FILE", help="what to replay")
    parser.add_argument(
        "--layout",
        action="append",
        default=[],
        metavar="'-tp 4 -dcp 2 ...'",
        help="flags of a layout (every --decode-context-parallel-size 1, 2, 4, ... that fits)",
    )
    parser.add_argument(
        "--concurrency", default="1,2,4,8,16,32", metavar="N,N,...", help="users (1,2,4,8,16,32)"
    )
    parser.add_argument("--duration", type=float, default=60.0, help="seconds of a point (60)")
    parser.add_argument("--trace-seed", type=int, default=0, help="of prompts (0)")
    parser.add_argument("--scale", type=int, default=1, help="that the trace was scaled by (1)")
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("sweep"),
        metavar="DIRECTORY",
        help="of points.jsonl, which makes a sweep go on where it ended, and of the reports (sweep)",
    )
    add_trace_flags(parser)
    add_engine_flags(parser, positional_model=True)


def run(arguments: argparse.Namespace) -> int:
    """Runs the subject."""
    refuse_no_time("--duration", arguments.duration)
    refuse_below(("--scale", arguments.scale, 1), ("--trace-seed", arguments.trace_seed, 0))
    console = stderr_console()
    plan = SweepPlan(
        layouts=_layouts(arguments, console),
        users=_users(arguments.concurrency),
        trace=read_trace(arguments.trace, read_options(arguments)),
        scale=arguments.scale,
        duration_s=arguments.duration,
        seed=arguments.trace_seed,
    )
    directory: Path = arguments.output
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--output {directory} cannot be made: {error.strerror}.") from None

    def begun(name: str, users: int) -> Told:
        console.print(f"{name}, {users} users", style="dim", markup=False)
        return lambda *_: None

    points = run_sweep(plan, directory / "points.jsonl", begun=begun)
    if not points:
        console.print("Interrupted before the first point was whole.")
        return 1
    command = f"kvspan {shlex.join(sys.argv[1:])}"
    write_text(sweep_page(f"Sweep, {arguments.trace.name}", command, points), directory / "sweep.html")
    write_text(sweep_csv(points), directory / "sweep.csv")
    for suffix in ("svg", "png"):
        save(pareto_plot(points), directory / f"pareto.{suffix}")
    wide = Console(highlight=False)
    wide.width = max(wide.width, _WIDTH)
    wide.print(sweep_table(points).rich())
    console.print(f"Reports are in {directory}.", markup=False)
    return 0


def _users(text: str) -> list[int]:
    try:
        users = [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"--concurrency {text} is no list of numbers like 4,8,16.") from None
    if min(users) < 1:
        raise ConfigError(f"--concurrency {min(users)} is too small: 1 or more.")
    return users


def _layouts(arguments: argparse.Namespace, console: Console) -> list[Layout]:
    if arguments.layout:
        return [
            Layout(text, _config(arguments, layout_flags(text, command="kvspan bench sweep")))
            for text in arguments.layout
        ]
    found, tp_size = [], engine_config(arguments).tensor_parallel_size
    for dcp_size in (2**power for power in range(tp_size.bit_length())):
        name = f"-tp {tp_size} -dcp {dcp_size}"
        config = _config(arguments, {"decode_context_parallel_size": dcp_size})
        try:
            resolve_engine(config)
        except LayoutError as refused:
            console.print(f"{name} is left out: {refused}", style="dim", markup=False)
        else:
            found.append(Layout(name, config))
    return found


def _config(arguments: argparse.Namespace, changes: dict[str, Any]) -> EngineConfig:
    return engine_config(argparse.Namespace(**{**vars(arguments), **changes}))
