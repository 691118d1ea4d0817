"""A span for each request beside its rivals: whole replicas, and a span for all.

    replicas    the same ranks, each an engine of its own: short requests cost nothing, long ones have
                to fit
    static      every request spans the DCP group, by the exchange that decodes faster here
    elastic     short requests stay on one home, long ones span

    curve       seconds of a decoded token by length of context, over made-up keys
    traffic     a closed loop of users on a trace; the KV cache of a rank holds about one long request

All run in the same process by turns, so a machine that slows down slows all of them.
"""

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec

from kvspan.bench.contender import ROOM_TOKENS, Case
from kvspan.bench.figures import Figures, figures
from kvspan.bench.fleet import Fleet
from kvspan.bench.record import Observed
from kvspan.config.engine import EngineConfig
from kvspan.config.sizes import KV_DTYPE_BYTES
from kvspan.cost.memory import kv_bytes_per_token
from kvspan.engine.build import resolve_engine
from kvspan.errors import ConfigError
from kvspan.trace.cut import scaled
from kvspan.trace.row import Trace
from kvspan.trace.stats import K, Spread
from kvspan.trace.synth import PROFILES, synthesize

REPLICAS, STATIC, ELASTIC = "replicas", "static", "elastic"
EXCHANGES = ("a2a", "ag_rs")
LONG_TOKENS = 16 * K
"""Prompts of the mixed trace from which on they are long, before scaling."""

Options = Mapping[str, Any]


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
        users: of a closed loop.
        scale: what lengths of prompts are divided by.
        output_scale: and of outputs.
        cache_tokens: that the KV cache of a rank holds under traffic; None = the longest prompt.
        stop_s: of a replay.
        seed: of traces and prompts.
    """

    contexts: tuple[int, ...]
    batch: int
    num_steps: int
    num_rounds: int
    traces: tuple[str, ...]
    num_rows: int
    users: int
    scale: int
    output_scale: int
    cache_tokens: int | None
    stop_s: float
    seed: int = 0

    def trace(self, name: str) -> Trace:
        """A made-up trace, scaled."""
        whole = synthesize(PROFILES[name], num_rows=self.num_rows, seed=self.seed)
        return scaled(whole, scale=self.scale, output_scale=self.output_scale)


class CurvePoint(msgspec.Struct, frozen=True, kw_only=True):
    """What a rival needs for a token.

    Args:
        rival: who.
        exchange: how its partial results meet; empty where none do.
        context: tokens of each prompt.
        batch: sequences.
        tpot_ms: the median step.
        p90_ms: of the steps.
        ratio: to the replicas, the median of the rounds' ratios.
        worst_ratio: the highest of them.
        exchange_share: of its steps, those with a request on several ranks.
    """

    rival: str
    exchange: str
    context: int
    batch: int
    tpot_ms: float
    p90_ms: float
    ratio: float
    worst_ratio: float
    exchange_share: float


class Traffic(msgspec.Struct, frozen=True, kw_only=True):
    """What a rival did with a trace, in one round.

    Args:
        rival: who.
        trace: its name.
        round: number of it.
        found: the usual figures.
        long_tpot_ms: mean time of a token of requests with long prompts; None = none had two tokens.
        short_tpot_ms: of the others.
        num_steps: of all engines.
        exchange_steps: those of them with a request on several ranks.
        plain_step_ms: mean time of a step without one; None = there was none.
        exchange_step_ms: of a step with one.
        spills: requests that left their home early.
    """

    rival: str
    trace: str
    round: int
    found: Figures
    long_tpot_ms: Spread | None
    short_tpot_ms: Spread | None
    num_steps: int
    exchange_steps: int
    plain_step_ms: float | None
    exchange_step_ms: float | None
    spills: int

    @property
    def exchange_share(self) -> float:
        """Of its steps, those with a request on several ranks."""
        return self.exchange_steps / max(self.num_steps, 1)

    @property
    def bound(self) -> float | None:
        """How many times faster its mean step is than if all had an exchange; None = nobody knows."""
        if self.plain_step_ms is None or self.exchange_step_ms is None:
            return None
        share = self.exchange_share
        mean_ms = share * self.exchange_step_ms + (1 - share) * self.plain_step_ms
        return self.exchange_step_ms / mean_ms


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """One layout over one transport.

    Args:
        layout: flags of static and elastic.
        comm: transport.
        threshold: tokens up to which elastic keeps a request at home.
        why: where that is from.
        cache_tokens: of a rank, under traffic.
        exchange: the static rival's best.
        curve: by context, then rival.
        traffic: by trace, round and rival.
    """

    layout: str
    comm: str
    threshold: int
    why: str
    cache_tokens: int
    exchange: str
    curve: tuple[CurvePoint, ...]
    traffic: tuple[Traffic, ...]


def measure(
    options: Options, layout: str, plan: Plan, *, told: Callable[[str], None] = lambda _: None
) -> Measured:
    """Measures a layout and its rivals.

    Args:
        options: of the elastic engine, but for sizes that the plan decides; those of its rivals follow.
        layout: how the layout is called.
        plan: what is measured.
        told: called with what is being done.

    Raises:
        ConfigError: a rival cannot run, or its cache does not hold a case.
        ModelError: the model cannot be found or read.
    """
    elastic, _ = resolve_engine(EngineConfig.from_mapping(rivals(options)[ELASTIC][0]))
    curve = tuple(_curve(options, plan, told)) if plan.contexts else ()
    exchange = best_exchange(curve)
    cache_tokens = plan.cache_tokens or _longest_prompt(plan)
    traffic = [
        each
        for name in plan.traces
        for each in _traffic({**options, "dcp_comm_backend": exchange}, plan, name, cache_tokens, told)
    ]
    return Measured(
        layout=layout,
        comm=elastic.comm,
        threshold=elastic.span_threshold,
        why=elastic.why.get("span_threshold", "--dcp-span-threshold says so."),
        cache_tokens=cache_tokens,
        exchange=exchange,
        curve=curve,
        traffic=tuple(traffic),
    )


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


def best_exchange(curve: Sequence[CurvePoint]) -> str:
    """The exchange by which the static rival decoded faster, over all contexts; a2a if none was seen."""
    total_ms = {
        name: sum(p.tpot_ms for p in curve if (p.rival, p.exchange) == (STATIC, name))
        for name in {p.exchange for p in curve if p.rival == STATIC}
    }
    return min(total_ms, key=lambda name: total_ms[name], default=EXCHANGES[0])


@contextmanager
def _fleets(named: Sequence[tuple[str, Sequence[Options]]]) -> Iterator[list[Fleet]]:
    """Engines that run while this lasts."""
    fleets: list[Fleet] = []
    try:
        for name, engines in named:
            fleets.append(Fleet(name, [EngineConfig.from_mapping(each) for each in engines]))
        yield fleets
    finally:
        for fleet in fleets:
            fleet.shutdown()


def _curve(options: Options, plan: Plan, told: Callable[[str], None]) -> Iterator[CurvePoint]:
    """Decodes each context by turns."""
    sizes = {
        "max_model_len": max(plan.contexts) + plan.num_steps + ROOM_TOKENS,
        "max_num_seqs": 2 * plan.batch,
        "enable_prefix_caching": True,
    }
    engines = rivals({**options, **sizes})
    named = [(REPLICAS, "", engines[REPLICAS])]
    named += [(STATIC, name, [{**engines[STATIC][0], "dcp_comm_backend": name}]) for name in EXCHANGES]
    named.append((ELASTIC, EXCHANGES[0], engines[ELASTIC]))
    with _fleets([(f"{rival} {exchange}".strip(), its) for rival, exchange, its in named]) as fleets:
        for turn, context in enumerate(plan.contexts):
            told(f"context {context}, batch {plan.batch}")
            rounds: list[list[list[float]]] = [[] for _ in fleets]
            for fleet in fleets:
                case = Case(context, plan.batch)
                fleet.fill(case, num_steps=plan.num_steps, seed=plan.seed + (turn << 32))
            before = [fleet.stats for fleet in fleets]
            for _ in range(plan.num_rounds):
                for fleet, its in zip(fleets, rounds, strict=True):
                    its.append(fleet.decode(plan.num_steps))
            for i, (rival, exchange, _) in enumerate(named):
                steps = fleets[i].stats.steps - before[i].steps
                exchanged = fleets[i].stats.exchange_steps - before[i].exchange_steps
                yield _point(
                    rival, exchange, context, plan.batch, rounds[i], rounds[0], exchanged / steps
                )


def _point(
    rival: str,
    exchange: str,
    context: int,
    batch: int,
    rounds: Sequence[Sequence[float]],
    first: Sequence[Sequence[float]],
    exchange_share: float,
) -> CurvePoint:
    seconds = sorted(s for each in rounds for s in each)
    ratios = [
        statistics.median(mine) / statistics.median(its) for mine, its in zip(rounds, first, strict=True)
    ]
    return CurvePoint(
        rival=rival,
        exchange=exchange,
        context=context,
        batch=batch,
        tpot_ms=statistics.median(seconds) * 1e3,
        p90_ms=seconds[round(0.9 * (len(seconds) - 1))] * 1e3,
        ratio=statistics.median(ratios),
        worst_ratio=max(ratios),
        exchange_share=exchange_share,
    )


def _longest_prompt(plan: Plan) -> int:
    names = plan.traces or ("mixed",)
    return max(row.input_length for name in names for row in plan.trace(name).rows)


def _traffic(
    options: Options, plan: Plan, name: str, cache_tokens: int, told: Callable[[str], None]
) -> Iterator[Traffic]:
    """Replays a trace, rival by rival and back again."""
    trace = plan.trace(name)
    named = _under_traffic(options, trace, plan.users, cache_tokens)
    with _fleets(list(named.items())) as fleets:
        for fleet in fleets:  # what runs for the first time takes longer
            fleet.replay(Trace(trace.rows[:2], trace.block_tokens), users=2, seed=plan.seed - 1)
        for number in range(plan.num_rounds):
            for fleet in fleets if number % 2 == 0 else fleets[::-1]:
                told(f"{name} traffic, round {number + 1}: {fleet.name}")
                before = fleet.stats
                observed = fleet.replay(
                    trace, users=plan.users, seed=plan.seed + number, stop_s=plan.stop_s
                )
                stats = fleet.stats
                yield _of_round(
                    fleet.name,
                    name,
                    number,
                    observed,
                    plan.scale,
                    num_ranks=len(named[REPLICAS]),
                    spills=stats.spills - before.spills,
                )


def _under_traffic(
    options: Options, trace: Trace, users: int, cache_tokens: int
) -> dict[str, list[dict[str, Any]]]:
    """The rivals with caches of equal bytes a rank. A replica refuses what it cannot hold at all."""
    longest = max(row.input_length + row.output_length for row in trace.rows)
    engines = rivals({**options, "max_num_seqs": users})
    found: dict[str, list[dict[str, Any]]] = {}
    for rival, its in engines.items():
        resolved, _ = resolve_engine(EngineConfig.from_mapping(its[0]))
        block = resolved.block_size
        whole_blocks = -(-cache_tokens // block) * block
        size = kv_bytes_per_token(
            resolved.model_config, kv_dtype_bytes=KV_DTYPE_BYTES[resolved.kv_dtype]
        )
        holds = whole_blocks * (resolved.dcp_size if rival != REPLICAS else 1)
        if rival != REPLICAS and holds <= longest:
            raise ConfigError(
                f"--cache-tokens {cache_tokens} on each of {resolved.dcp_size} ranks do not hold the "
                f"longest request of {longest} tokens: raise it, or raise --scale."
            )
        limits = {"kv_cache_memory": whole_blocks * size, "max_model_len": min(longest + 1, holds)}
        found[rival] = [{**each, **limits} for each in its]
    return found


def _of_round(
    rival: str,
    name: str,
    number: int,
    observed: Observed,
    scale: int,
    *,
    num_ranks: int,
    spills: int,
) -> Traffic:
    def tpot_ms(long: bool) -> Spread | None:
        some = [
            1e3 * r.tpot_s
            for r in observed.records
            if r.tpot_s is not None and (r.input_tokens * scale >= LONG_TOKENS) == long
        ]
        return Spread.of(some) if some else None

    def step_ms(exchanged: bool) -> float | None:
        some = [s.lasts_s * 1e3 for s in observed.samples if bool(s.exchanged) == exchanged]
        return statistics.mean(some) if some else None

    return Traffic(
        rival=rival,
        trace=name,
        round=number,
        found=figures(observed, num_ranks=num_ranks, scale=scale),
        long_tpot_ms=tpot_ms(True),
        short_tpot_ms=tpot_ms(False),
        num_steps=len(observed.samples),
        exchange_steps=sum(bool(s.exchanged) for s in observed.samples),
        plain_step_ms=step_ms(False),
        exchange_step_ms=step_ms(True),
        spills=spills,
    )
