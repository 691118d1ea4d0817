"""What a command prints about an engine: what will run and why, and what its cache holds."""

from collections.abc import Sequence

import msgspec
from rich.console import Console

from kvspan.config.resolved import Resolved
from kvspan.config.sizes import format_bytes
from kvspan.cost.memory import CachePlan
from kvspan.engine.core import EngineCore
from kvspan.step import RankReport


def stderr_console() -> Console:
    """For everything but a command's result, which goes to stdout."""
    return Console(stderr=True, highlight=False, soft_wrap=True)


def print_choices(console: Console, resolved: Resolved) -> None:
    """Prints what will run, with the reason of each choice that nobody made."""
    console.print(
        f"{resolved.model}: {resolved.topology.world_size} rank(s), {resolved.topology.flags}, "
        f"blocks of {resolved.block_size} tokens",
        markup=False,
    )
    values = msgspec.structs.asdict(resolved)
    for name, why in resolved.why.items():
        value = f" {values[name]}" if name in values else ""
        console.print(f"  {name}{value}: {why}", markup=False, style="dim")
    for note in resolved.notes:
        console.print(f"  note: {note}", markup=False)


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
        f"{format_bytes(plan.bytes_per_rank)} (weights: {format_bytes(weights)}). "
        f"Prefixes hit in units of {plan.hit_unit} tokens.",
    )
    console.print(f"  {plan.why}", markup=False, style="dim")
