"""`kvspan bench serve`: a trace replayed against a server, or on an engine of this process."""

import argparse
import shlex
import sys
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from kvspan.bench.figures import Figures, figures
from kvspan.bench.http import HttpReplay, Server
from kvspan.bench.offline import replay_offline
from kvspan.bench.profile import StepProfiler
from kvspan.bench.record import Observed
from kvspan.bench.schedule import ClosedLoop, OpenLoop, Schedule
from kvspan.bench.serve_report import (
    latency_table,
    length_table,
    requests_csv,
    serve_page,
    summary_table,
)
from kvspan.cli.bounds import refuse_below, refuse_no_rate, refuse_no_time
from kvspan.cli.flags import add_engine_flags, engine_config
from kvspan.cli.json_flag import JsonOutput, add_json_flag
from kvspan.cli.replay_bar import ReplayBar
from kvspan.cli.startup import print_capacity, print_choices, stderr_console
from kvspan.cli.trace_flags import add_trace_flags, read_options
from kvspan.engine.build import make_executor, resolve_engine
from kvspan.engine.core import EngineCore
from kvspan.errors import ConfigError
from kvspan.report.page import check_places, write_text
from kvspan.trace.mooncake import read_trace
from kvspan.trace.row import Trace
from kvspan.trace.tokens import FIRST_TOKEN

_VOCAB_SIZE = 32_000
"""Of prompts for a server that does not tell: smaller than almost every model's."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the subject's arguments."""
    parser.add_argument("--trace", type=Path, required=True, metavar="FILE", help="what to replay")
    where = parser.add_argument_group("Where requests go")
    where.add_argument(
        "--url", help="of a server, e.g. http://localhost:8000 (an engine of this process)"
    )
    where.add_argument("--served-model-name", help="the model's name at --url (the first one listed)")
    where.add_argument("--api-key", help="for --url")
    where.add_argument(
        "--extra-body",
        default="{}",
        metavar="JSON",
        help='merged into each request to --url; null takes a key out, e.g. {"ignore_eos": null}',
    )
    where.add_argument("--metrics-url", help="of the server's metrics (/metrics at --url)")
    where.add_argument(
        "--vocab-size", type=int, help=f"prompts are made of ids below it ({_VOCAB_SIZE}; the model's)"
    )
    where.add_argument("--num-ranks", type=int, default=1, help="ranks behind --url (1)")
    when = parser.add_argument_group("When requests go")
    when.add_argument(
        "--concurrency", type=int, help="closed loop: so many users, who ask as they are answered"
    )
    when.add_argument(
        "--speed-up",
        type=float,
        help="open loop, the default: the trace's times, so many times faster (1)",
    )
    when.add_argument("--rows", type=int, help="of the trace, at the most (all)")
    when.add_argument("--duration", type=float, help="stop after so many seconds (when all is answered)")
    when.add_argument("--trace-seed", type=int, default=0, help="of prompts (0)")
    out = parser.add_argument_group("Results")
    out.add_argument(
        "--scale", type=int, default=1, help="that the trace was scaled by, for buckets (1)"
    )
    add_json_flag(out)
    out.add_argument("--csv", type=Path, metavar="FILE", help="a line for each request")
    out.add_argument("--html", type=Path, metavar="FILE", help="a page with tables and plots")
    out.add_argument(
        "--profile",
        type=Path,
        metavar="FILE",
        help="some steps as a Chrome trace, a row for each rank (for https://ui.perfetto.dev)",
    )
    out.add_argument("--profile-steps", type=int, default=50, help="how many (50)")
    out.add_argument("--profile-skip", type=int, default=20, help="steps before them (20)")
    add_trace_flags(parser)
    add_engine_flags(parser, positional_model=True)


def run(arguments: argparse.Namespace) -> int:
    """Runs the subject; what was measured before a Ctrl-C is reported, too."""
    _check(arguments)
    json = JsonOutput(arguments)
    check_places(arguments.csv, arguments.html, arguments.profile)
    trace = read_trace(arguments.trace, read_options(arguments))
    trace = Trace(trace.rows[: arguments.rows], trace.block_tokens)
    observed, num_ranks = (_over_http if arguments.url else _in_process)(arguments, trace)
    found = figures(observed, num_ranks=num_ranks, scale=arguments.scale)
    _report(arguments, json, found, observed, num_ranks)
    return 1 if found.num_errors and not found.num_ok else 0


def _check(arguments: argparse.Namespace) -> None:
    if arguments.concurrency is not None and arguments.speed_up is not None:
        raise ConfigError(
            "--concurrency and --speed-up exclude each other: a closed loop goes by answers, an open "
            "one by the trace's times."
        )
    refuse_below(
        ("--rows", arguments.rows, 1),
        ("--concurrency", arguments.concurrency, 1),
        ("--num-ranks", arguments.num_ranks, 1),
        ("--scale", arguments.scale, 1),
        ("--trace-seed", arguments.trace_seed, 0),
        ("--profile-steps", arguments.profile_steps, 1),
        ("--profile-skip", arguments.profile_skip, 0),
        ("--vocab-size", arguments.vocab_size, FIRST_TOKEN + 1),
    )
    refuse_no_rate("--speed-up", arguments.speed_up, "times the trace's own pace")
    refuse_no_time("--duration", arguments.duration)
    if arguments.profile is not None and arguments.url is not None:
        raise ConfigError("--profile watches an engine of this process, and not the server at --url.")
    if (arguments.url is None) == (vars(arguments).get("model") is None):
        raise ConfigError("Give either a model to run in this process, or the --url of a server.")


def _schedule(arguments: argparse.Namespace, trace: Trace) -> Schedule:
    if arguments.concurrency is not None:
        return ClosedLoop(trace, users=arguments.concurrency)
    return OpenLoop(trace, speed_up=1.0 if arguments.speed_up is None else arguments.speed_up)


def _over_http(arguments: argparse.Namespace, trace: Trace) -> tuple[Observed, int]:
    server = Server(
        url=arguments.url,
        model=arguments.served_model_name,
        api_key=arguments.api_key,
        extra_body=_extra_body(arguments.extra_body),
        metrics_url=arguments.metrics_url,
    )
    with ReplayBar(stderr_console(), len(trace.rows)) as bar:
        observed = HttpReplay(
            server,
            trace,
            _schedule(arguments, trace),
            vocab_size=arguments.vocab_size or _VOCAB_SIZE,
            users=arguments.concurrency or 0,
            seed=arguments.trace_seed,
            stop_s=arguments.duration or float("inf"),
            told=bar.show,
        ).run()
    return observed, arguments.num_ranks


def _in_process(arguments: argparse.Namespace, trace: Trace) -> tuple[Observed, int]:
    console = stderr_console()
    resolved, _ = resolve_engine(engine_config(arguments))
    print_choices(console, resolved)
    executor = make_executor(resolved, watched=arguments.profile is not None)
    core = EngineCore(resolved, executor)
    skip, steps = arguments.profile_skip, arguments.profile_steps
    profiler = StepProfiler(executor, skip=skip, steps=steps if arguments.profile is not None else 0)
    try:
        print_capacity(console, core)

        def told(observed: Observed, now_s: float) -> None:
            bar.show(observed, now_s)
            profiler.after_step(observed)

        with ReplayBar(console, len(trace.rows)) as bar:
            observed = replay_offline(
                core,
                trace,
                _schedule(arguments, trace),
                users=arguments.concurrency or 0,
                seed=arguments.trace_seed,
                stop_s=arguments.duration or float("inf"),
                told=told,
            )
        if arguments.profile is not None:
            profiler.stop()
            write_text(profiler.trace(observed).decode(), arguments.profile)
        return observed, resolved.topology.world_size
    finally:
        core.shutdown()


def _extra_body(text: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise ConfigError(f"--extra-body is no JSON object: {error}.") from None


def _report(
    arguments: argparse.Namespace,
    json: JsonOutput,
    found: Figures,
    observed: Observed,
    num_ranks: int,
) -> None:
    title = f"{arguments.url or arguments.model}, {arguments.trace.name}"
    command = f"kvspan {shlex.join(_without_secrets(sys.argv[1:]))}"
    json.write(found)
    if arguments.csv is not None:
        write_text(requests_csv(observed.records), arguments.csv)
    if arguments.html is not None:
        write_text(serve_page(title, command, found, observed, num_ranks=num_ranks), arguments.html)
    if not json.is_alone:
        console = Console(highlight=False)
        for table in (
            summary_table(found, num_ranks=num_ranks),
            latency_table(found),
            length_table(found),
        ):
            console.print(table.rich())
        for error, count in found.errors.items():
            console.print(f"{count} x {error}", markup=False)
    if found.interrupted:
        stderr_console().print("Interrupted: these are the figures of what was measured by then.")


def _without_secrets(typed: list[str]) -> list[str]:
    """A command line to print: the value of --api-key is left out."""
    return [
        "--api-key=..." if text.startswith("--api-key=") else "..." if before == "--api-key" else text
        for before, text in zip(["", *typed], typed, strict=False)
    ]
