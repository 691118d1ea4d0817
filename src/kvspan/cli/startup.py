"""What a command prints about an engine: what will run and why, and what its cache holds."""

import textwrap
from collections.abc import Sequence

import msgspec
from rich.console import Console

from kvspan.config.engine import ENGINE_OPTIONS
from kvspan.config.options import as_flag
from kvspan.config.resolved import Resolved
from kvspan.config.sizes import format_bytes
from kvspan.cost.latents import NEVER
from kvspan.cost.memory import CachePlan
from kvspan.cost.prefill import FEWEST_BYTES
from kvspan.engine.core import EngineCore
from kvspan.step import RankReport
from kvspan.topology import Span

_OPTIONS = {option.name: option.name for option in ENGINE_OPTIONS} | {
    "interleave": "cp_kv_cache_interleave_size",
    "exchange": "dcp_comm_backend",
    "replicate_q": "dcp_q_replicate",
    "span_threshold": "dcp_span_threshold",
    "kv_dtype": "kv_cache_dtype",
    "executor": "distributed_executor_backend",
    "kv_fraction": "gpu_memory_utilization",
}
"""Options that say what a choice is, by its name in `Resolved`; docs/serving.md tells of the others."""

_WIDTH = 120
"""Columns of a line at the most, whatever a terminal or a log has."""


def stderr_console() -> Console:
    """For everything but a command's result, which goes to stdout."""
    return Console(stderr=True, highlight=False, soft_wrap=True)


def print_choices(console: Console, resolved: Resolved) -> None:
    """Prints what will run, with the reason of each choice that nobody made, under its flag."""
    console.print(
        f"{resolved.model}: {resolved.topology.world_size} rank(s), {resolved.topology.flags}, "
        f"blocks of {resolved.block_size} tokens",
        markup=False,
    )
    values = msgspec.structs.asdict(resolved)
    for name, why in resolved.why.items():
        said = as_flag(_OPTIONS[name]) if name in _OPTIONS else name
        value = f" {_shown(values[name])}" if name in values else ""
        _print_folded(console, f"  {said}{value}: {why}", style="dim")
    for note in resolved.notes:
        _print_folded(console, f"  note: {note}")


def _print_folded(console: Console, line: str, *, style: str | None = None) -> None:
    """Prints a line, and what is too long of it further to the right."""
    folded = textwrap.fill(
        line, _WIDTH, subsequent_indent="      ", break_long_words=False, break_on_hyphens=False
    )
    console.print(folded, markup=False, style=style)


def _shown(value: object) -> str:
    """A choice as a reader of a flag's help would spell it."""
    match value:
        case bool():
            return "on" if value else "off"
        case Span() if not value.size:
            return "none"
        case Span():
            return f"{value.start} to {value.stop - 1}"
        case str() if value == FEWEST_BYTES:  # not a word that the flag takes
            return "auto (whichever moves less, sequence by sequence)"
        case _:
            return "never" if value == NEVER else f"{value}"


def print_capacity(console: Console, core: EngineCore) -> None:
    """Prints what the KV cache holds, per rank and in all, and the unit of prefix hits."""
    print_plan(console, core.plan, core.reports)


def print_plan(console: Console, plan: CachePlan, reports: Sequence[RankReport]) -> None:
    """The same of ranks that run elsewhere.

    Args:
        console: where to.
        plan: of their caches.
        reports: of the ranks.
    """
    weights = max(report.weight_bytes for report in reports)
    console.print(
        f"KV cache: {plan.tokens_total:,} tokens in all, {plan.tokens_per_rank:,} on each rank in "
        f"{format_bytes(plan.bytes_per_rank)} (weights: {format_bytes(weights)}).",
    )
    _print_folded(console, f"  {plan.why}", style="dim")
    console.print(f"  Prefixes hit in units of {plan.hit_unit} tokens.", style="dim")
