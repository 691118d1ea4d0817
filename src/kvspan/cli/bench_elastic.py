"""`kvspan bench elastic`: a span for each request beside replicas and a span for all."""

import argparse
import shlex
import sys
from pathlib import Path

from rich.console import Console

from kvspan.bench.answered import Bounds
from kvspan.bench.elastic import Measured, measure
from kvspan.bench.elastic_report import (
    curve_plot,
    curve_table,
    elastic_page,
    traffic_tables,
    verdicts,
)
from kvspan.bench.rivals import Layout, Plan
from kvspan.cli.bounds import refuse_below, refuse_no_rate, refuse_no_time
from kvspan.cli.flags import add_engine_flags, asked_of, layout_flags
from kvspan.cli.json_flag import JsonOutput, add_json_flag
from kvspan.cli.startup import stderr_console
from kvspan.config.engine import ENGINE_OPTIONS, EngineConfig
from kvspan.config.sizes import parse_count
from kvspan.errors import ConfigError
from kvspan.plan.asked import DURATION
from kvspan.report.page import check_places, write_text
from kvspan.report.plots import refuse_no_plot, save
from kvspan.trace.synth import PROFILES

_WIDTH = 130
"""Columns that the tables need, whatever a pipe is taken to have."""
_LAYOUT = "-pcp 2 -dcp 2"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the subject's arguments."""
    parser.add_argument(
        "--layout",
        action="append",
        default=[],
        metavar="'-tp 2 -dcp 2 ...'",
        help=f"flags of the elastic engine, from which its rivals follow ({_LAYOUT}); may be repeated, "
        "and layouts of as many ranks take turns beside the same replicas",
    )
    parser.add_argument(
        "--over", metavar="shm,gloo", help="transports to measure by turns (--comm alone)"
    )
    curve = parser.add_argument_group("Time of a token by context")
    curve.add_argument(
        "--context", default="256,1024,4096", metavar="N,N,...", help="tokens (256,1024,4096); 0 = none"
    )
    curve.add_argument("--batch", type=int, default=4, help="sequences (4)")
    curve.add_argument("--steps", type=int, default=16, help="that count, in a round (16)")
    traffic = parser.add_argument_group("Traffic")
    traffic.add_argument(
        "--trace", default="short,mixed", help="made-up traces: short, mixed, none (short,mixed)"
    )
    traffic.add_argument("--rows", type=int, default=40, help="requests of a trace (40)")
    traffic.add_argument("--concurrency", type=int, default=8, help="users of the closed loop (8)")
    traffic.add_argument(
        "--request-rate",
        type=float,
        metavar="R",
        help="requests a second, answered or not, instead of users; --concurrency run at a time",
    )
    traffic.add_argument("--scale", type=int, default=16, help="divide lengths of prompts by it (16)")
    traffic.add_argument("--output-scale", type=int, default=8, help="and of outputs (8)")
    traffic.add_argument(
        "--cache-tokens",
        type=int,
        help="that the KV cache of a rank holds under traffic, in whole blocks (the longest prompt with "
        "its answer, of short and of mixed traffic, whichever are replayed)",
    )
    traffic.add_argument(
        "--duration", type=float, default=300.0, help="seconds after which a replay is ended (300)"
    )
    traffic.add_argument(
        "--ttft", metavar="TIME", help="goodput counts answers that began by then, e.g. 2s (any)"
    )
    traffic.add_argument(
        "--tpot", metavar="TIME", help="and had a token in that time, in the mean, e.g. 50ms (any)"
    )
    traffic.add_argument("--trace-seed", type=int, default=0, help="of traces and prompts (0)")
    parser.add_argument("--rounds", type=int, default=3, help="of the curve and of each trace (3)")
    add_json_flag(parser)
    parser.add_argument("--html", type=Path, metavar="FILE", help="a page with tables and the picture")
    parser.add_argument(
        "--svg", type=Path, metavar="FILE", help="the picture alone; of several, a file each (FILE-gloo)"
    )
    add_engine_flags(parser, positional_model=True)


def run(arguments: argparse.Namespace) -> int:
    """Runs the subject."""
    plan = _plan(arguments)
    json = JsonOutput(arguments)
    check_places(arguments.html, arguments.svg)
    if arguments.svg is not None:
        refuse_no_plot(arguments.svg)
    quiet = stderr_console()
    console = Console(highlight=False, quiet=json.is_alone)
    console.width = max(console.width, _WIDTH)
    found = []
    for layouts in _alike(arguments):
        each = measure(layouts, plan, told=lambda what: quiet.print(what, style="dim", markup=False))
        _print(console, each)
        found.append(each)
    _report(arguments, json, found)
    return 0


def _alike(arguments: argparse.Namespace) -> list[list[Layout]]:
    """Layouts that take turns: those of as many ranks, over each transport."""
    typed = vars(arguments)
    comms = str(arguments.over or typed.get("comm", "auto")).split(",")
    found: dict[tuple[str, int], list[Layout]] = {}
    for text in dict.fromkeys(arguments.layout or [_LAYOUT]):
        own = layout_flags(text, command="kvspan bench elastic")
        common = asked_of(argparse.Namespace(**{**typed, **own}), ENGINE_OPTIONS)
        config = EngineConfig.from_mapping(common)
        config.refuse_replicas()
        num_ranks = config.tensor_parallel_size * config.prefill_context_parallel_size
        for comm in comms:
            options = {"num_threads": 1, **common, "comm": comm}
            found.setdefault((comm, num_ranks), []).append((text, options))
    return list(found.values())


def _plan(arguments: argparse.Namespace) -> Plan:
    refuse_below(
        ("--batch", arguments.batch, 1),
        ("--steps", arguments.steps, 1),
        ("--rows", arguments.rows, 2),
        ("--concurrency", arguments.concurrency, 1),
        ("--rounds", arguments.rounds, 1),
        ("--cache-tokens", arguments.cache_tokens, 1),
        ("--scale", arguments.scale, 1),
        ("--output-scale", arguments.output_scale, 1),
        ("--trace-seed", arguments.trace_seed, 0),
    )
    refuse_no_time("--duration", arguments.duration)
    refuse_no_rate("--request-rate", arguments.request_rate, "requests a second")
    contexts, traces = _contexts(arguments.context), _traces(arguments.trace)
    if not contexts and not traces:
        raise ConfigError(
            f"--context {arguments.context} --trace {arguments.trace} leave nothing to measure: give a "
            "context or a trace."
        )
    return Plan(
        contexts=contexts,
        batch=arguments.batch,
        num_steps=arguments.steps,
        num_rounds=arguments.rounds,
        traces=traces,
        num_rows=arguments.rows,
        users=arguments.concurrency,
        rate_per_s=arguments.request_rate,
        scale=arguments.scale,
        output_scale=arguments.output_scale,
        cache_tokens=arguments.cache_tokens,
        stop_s=arguments.duration,
        bounds=Bounds(
            ttft_s=_duration("--ttft", arguments.ttft), tpot_s=_duration("--tpot", arguments.tpot)
        ),
        seed=arguments.trace_seed,
    )


def _duration(flag: str, text: str | None) -> float | None:
    """Seconds, or None if nobody asked."""
    try:
        return None if text is None else DURATION.read(text)
    except ValueError as error:
        raise ConfigError(f"{flag} {text} {error}.") from None


def _contexts(text: str) -> tuple[int, ...]:
    try:
        contexts = sorted({parse_count(part) for part in text.split(",")} - {0})
    except ValueError as error:
        raise ConfigError(f"--context {text}: {error}.") from None
    if contexts and contexts[0] < 2:
        raise ConfigError(f"--context {text}: {contexts[0]} is too small, 2 or more.")
    return tuple(contexts)


def _traces(text: str) -> tuple[str, ...]:
    names = tuple(name for name in text.split(",") if name != "none")
    for name in names:
        if name not in PROFILES:
            raise ConfigError(f"--trace {name} is not one of {', '.join(PROFILES)}, none.")
    return names


def _print(console: Console, measured: Measured) -> None:
    if measured.curve:
        console.print(curve_table(measured).rich())
    for name in dict.fromkeys(t.trace for t in measured.traffic):
        for table in traffic_tables(measured, name):
            console.print(table.rich())
    for sentence in verdicts(measured):
        console.print(sentence, markup=False)


def _report(arguments: argparse.Namespace, json: JsonOutput, found: list[Measured]) -> None:
    command = f"kvspan {shlex.join(sys.argv[1:])}"
    json.write({"command": command, "measured": found})
    if arguments.html is not None:
        write_text(elastic_page("A span for each request", command, found), arguments.html)
    drawn = [each for each in found if each.curve] if arguments.svg is not None else []
    for number, each in enumerate(drawn):
        own = f"-{each.comm}" if len({d.comm for d in drawn}) == len(drawn) else f"-{number}-{each.comm}"
        path: Path = arguments.svg
        save(curve_plot(each), path.with_stem(path.stem + own) if len(drawn) > 1 else path)
