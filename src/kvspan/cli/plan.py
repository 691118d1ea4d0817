"""`kvspan plan`: which layout, how much context and how many users, before there is a GPU."""

import argparse
import importlib
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from kvspan.cli.flags import add_flags
from kvspan.cli.json_flag import JsonOutput, add_json_flag
from kvspan.cli.startup import stderr_console
from kvspan.cli.trace_flags import add_trace_flags, read_options
from kvspan.cost.facts import find_device, load_devices
from kvspan.plan import show
from kvspan.plan.asked import PLAN_OPTIONS, PlanAsked
from kvspan.plan.models import find_model
from kvspan.plan.page import plan_page
from kvspan.plan.replay import Simulated, simulate
from kvspan.plan.search import Plan, search
from kvspan.report.page import check_places, write_text
from kvspan.trace.mooncake import read_trace
from kvspan.trace.row import Trace
from kvspan.trace.stats import trace_stats

REFUSED = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="facts' name, directory, config file or hub id; or `calibrate`, to measure this machine",
    )
    add_flags(parser, [option for option in PLAN_OPTIONS if option.name != "model"])
    facts = parser.add_argument_group("Facts and traces")
    facts.add_argument(
        "--facts", type=Path, action="append", default=[], metavar="FILE.toml", help="more hardware"
    )
    facts.add_argument(
        "--trace", type=Path, metavar="FILE", help="requests to simulate; their means make the table"
    )
    facts.add_argument(
        "--simulate",
        action="store_true",
        help="run the engine's own scheduler on the best layout, and on the best of TP alone",
    )
    out = parser.add_argument_group("Output")
    out.add_argument("--all", action="store_true", help="every choice, and every refused layout")
    add_json_flag(out)
    out.add_argument("--html", type=Path, metavar="FILE", help="write a page with plots too")
    add_trace_flags(parser)
    calibrate = parser.add_argument_group("calibrate")
    calibrate.add_argument("--ranks", type=int, default=2, help="ranks of this host, at the most (2)")
    calibrate.add_argument("--name", default="this-host", help="of the row (this-host)")
    calibrate.add_argument(
        "--write", type=Path, metavar="FILE.toml", help="where the row goes (default: stdout)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Runs the command."""
    if arguments.model == "calibrate":
        # It measures with torch, which planning does without.
        return int(vars(importlib.import_module("kvspan.cli.plan_calibrate"))["run"](arguments))
    json = JsonOutput(arguments)
    check_places(arguments.html)
    names = {option.name for option in PLAN_OPTIONS}
    typed = {name: value for name, value in vars(arguments).items() if name in names}
    trace = None if arguments.trace is None else read_trace(arguments.trace, read_options(arguments))
    asked = PlanAsked.from_mapping(typed if trace is None else {**_load_of(trace, typed), **typed})
    device = find_device(asked.hardware, load_devices(arguments.facts))
    plan = search(asked, find_model(asked.model), device)
    simulated = _simulate(plan, trace) if arguments.simulate or trace is not None else []
    if arguments.html is not None:
        write_text(plan_page(plan, simulated), arguments.html)
    json.write(show.as_json(plan, simulated))
    if not json.is_alone:
        _print(Console(highlight=False, soft_wrap=True), plan, simulated, everything=arguments.all)
    return 0 if plan.planned else REFUSED


def _load_of(trace: Trace, typed: dict[str, object]) -> dict[str, object]:
    """The means of a trace, as the question that closed formulas answer."""
    (block_size,) = (option for option in PLAN_OPTIONS if option.name == "block_size")
    stats = trace_stats(trace, hit_unit=block_size.read(typed.get("block_size")))
    mean = max(round(stats.input_tokens.mean), 1)
    new = max(round(mean * (1 - stats.ideal_hit_rate)), 1)
    return {"input": mean, "output": max(round(stats.output_tokens.mean), 1), "new_tokens": new}


def _simulate(plan: Plan, trace: Trace | None) -> list[Simulated]:
    """The best layout, and the best without context parallelism."""
    chosen = (*plan.planned[:1], show.tp_alone(plan.planned))
    console, simulated = stderr_console(), []
    for planned in dict.fromkeys(p for p in chosen if p is not None):
        console.print(f"simulating {planned.candidate.layout} ...", style="dim", markup=False)
        simulated.append(simulate(plan, planned, trace))
    return simulated


def _print(console: Console, plan: Plan, simulated: Sequence[Simulated], *, everything: bool) -> None:
    console.print(show.question(plan), markup=False)
    for sentence in show.sentences(plan):
        console.print(sentence, markup=False)
    shown = plan.planned if everything else show.best_of_each(plan.planned)
    if shown:
        _print_table(
            console,
            "Each layout at its best number of users",
            show.LAYOUT_HEADS,
            show.layout_rows(shown),
        )
        best = plan.planned[0]
        _print_table(
            console, f"By users: {best.candidate.layout}", show.POINT_HEADS, show.point_rows(best.points)
        )
    if simulated:
        _print_table(console, "Simulated", show.SIMULATED_HEADS, show.simulated_rows(simulated))
        for each in simulated:
            for why, count in each.refused.items():
                console.print(f"{each.layout}: {count} of a replica's rows: {why}", markup=False)
    for refused in plan.refused if everything or not plan.planned else plan.refused[:6]:
        console.print(f"Refused {refused.layout}: {refused.why}", markup=False, style="dim")
    if not everything and plan.planned and len(plan.refused) > 6:
        console.print(f"{len(plan.refused) - 6} more are refused: --all shows them.", style="dim")


def _print_table(
    console: Console, title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]
) -> None:
    table = Table(title=title, title_justify="left")
    for i, head in enumerate(heads):
        table.add_column(head, justify="right" if i else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    width = max(console.width, 200)
    Console(highlight=False, soft_wrap=True, width=width).print(table)
