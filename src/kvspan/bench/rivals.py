"""Who is measured when elastic is, with what, and on which traffic. Starts engines; measures nothing.

replicas    the same ranks, each an engine of its own: short requests cost nothing, long ones have
            to fit
static      every request spans the DCP group, by the exchange that decodes faster here
elastic     short requests stay on one home, long ones span

Layouts of as many ranks have the same replicas; of static and elastic there is one for each layout.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from kvspan.bench.answered import Bounds
from kvspan.bench.fleet import Fleet
from kvspan.bench.schedule import ClosedLoop, OpenLoop, Schedule
from kvspan.config.engine import EngineConfig
from kvspan.trace.cut import scaled
from kvspan.trace.row import Trace
from kvspan.trace.synth import PROFILES, synthesize

REPLICAS, STATIC, ELASTIC = "replicas", "static", "elastic"
USUAL_TRACES = ("short", "mixed")

Options = Mapping[str, Any]
Layout = tuple[str, Options]
"""What a layout is called, and the options of its elastic engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rival:
    """Who takes a turn.

    Args:
        kind: replicas, static or elastic.
        layout: what its layout is called; empty of replicas, which have none.
        engines: options of each.
        exchange: how its partial results meet; empty where none do, or where that is no question.
    """

    kind: str
    layout: str
    engines: Sequence[Options]
    exchange: str = ""

    @property
    def name(self) -> str:
        """For readers."""
        return " ".join(part for part in (self.kind, self.layout, self.exchange) if part)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is measured.

    Args:
        contexts: tokens of prompts of the curve, ascending.
        batch: sequences of the curve.
        num_steps: of the curve, counted in a round.
        num_rounds: of the curve, and of each trace.
        traces: names of profiles.
        num_rows: of a trace.
        users: of a closed loop, and who run at a time at the most.
        rate_per_s: requests that come in a second, answered or not; None = the loop is closed.
        scale: what lengths of prompts are divided by.
        output_scale: and of outputs.
        cache_tokens: that the KV cache of a rank holds under traffic, in whole blocks; None = what the
            longest request of all made-up traces needs (`rank_tokens`).
        stop_s: of a replay.
        bounds: of answers that goodput counts.
        seed: of traces and prompts.
    """

    contexts: tuple[int, ...]
    batch: int
    num_steps: int
    num_rounds: int
    traces: tuple[str, ...]
    num_rows: int
    users: int
    rate_per_s: float | None
    scale: int
    output_scale: int
    cache_tokens: int | None
    stop_s: float
    bounds: Bounds = field(default_factory=Bounds)
    seed: int = 0

    def trace(self, name: str) -> Trace:
        """A made-up trace, scaled."""
        rate_per_s = self.rate_per_s or 1.0
        whole = synthesize(PROFILES[name], num_rows=self.num_rows, rate_per_s=rate_per_s, seed=self.seed)
        return scaled(whole, scale=self.scale, output_scale=self.output_scale)

    def schedule(self, trace: Trace) -> Schedule:
        """Says which of its requests is sent when."""
        return ClosedLoop(trace, users=self.users) if self.rate_per_s is None else OpenLoop(trace)

    def rank_tokens(self, block: int) -> int:
        """That the KV cache of a rank holds under traffic, in whole blocks.

        Unless it was asked for, the longest request fits with its answer: of the traces that are
        replayed, and of the usual ones where they are not, so that each trace has the same cache.

        Args:
            block: tokens of one.
        """
        tokens = self.cache_tokens
        if tokens is None:
            names = dict.fromkeys((*USUAL_TRACES, *self.traces))
            tokens = max(
                row.input_length + row.output_length for n in names for row in self.trace(n).rows
            )
        return -(-tokens // block) * block


def rivals(options: Options) -> dict[str, list[dict[str, Any]]]:
    """Options of the engines of each rival.

    Args:
        options: of the elastic one.
    """
    config = EngineConfig.from_mapping(options)
    num_ranks = config.tensor_parallel_size * config.prefill_context_parallel_size
    alone = dict.fromkeys(
        (
            "tensor_parallel_size",
            "decode_context_parallel_size",
            "prefill_context_parallel_size",
        ),
        1,
    )
    idle = ("dcp_mode", "dcp_span_threshold", "dcp_comm_backend", "dcp_q_replicate", "comm")
    # A replica's rank is a process, as the others' are, so that engines do not compute in this one.
    replica = {k: v for k, v in options.items() if k not in idle} | alone
    static = {k: v for k, v in options.items() if k != "dcp_span_threshold"}
    return {
        REPLICAS: [{**replica, "distributed_executor_backend": "mp"}] * num_ranks,
        STATIC: [{**static, "dcp_mode": STATIC}],
        ELASTIC: [{**options, "dcp_mode": ELASTIC}],
    }


def turns(layouts: Sequence[Layout]) -> list[Rival]:
    """Everybody in order of turns: replicas, then static and elastic of each layout.

    Args:
        layouts: of as many ranks each; what replicas run beside it is the first one's.
    """
    by_layout = [(name, rivals(options)) for name, options in layouts]
    replicas = Rival(kind=REPLICAS, layout="", engines=by_layout[0][1][REPLICAS])
    return [
        replicas,
        *(
            Rival(kind=kind, layout=name, engines=engines[kind])
            for name, engines in by_layout
            for kind in (STATIC, ELASTIC)
        ),
    ]


@contextmanager
def fleets(running_in_turn: Sequence[Rival]) -> Iterator[list[Fleet]]:
    """Engines that run while this lasts, a fleet for each rival."""
    running: list[Fleet] = []
    try:
        for rival in running_in_turn:
            engines = [EngineConfig.from_mapping(each) for each in rival.engines]
            running.append(Fleet(rival.name, engines))
        yield running
    finally:
        for fleet in running:
            fleet.shutdown()
