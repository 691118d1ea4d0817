"""A span for each request beside its rivals: whole replicas, and a span for all.

    curve       seconds of a decoded token by length of context, over made-up keys
    traffic     a trace, by users who ask again when they are answered or at a rate; the KV cache of a
                rank holds about one long request

All run in the same process by turns, so a machine that slows down slows all of them.
"""

import statistics
from collections.abc import Callable, Iterator, Sequence

import msgspec

from kvspan.bench.contender import ROOM_TOKENS, Case
from kvspan.bench.elastic_traffic import Traffic, replays
from kvspan.bench.rivals import ELASTIC, REPLICAS, STATIC, Options, Plan, fleets, rivals
from kvspan.config.engine import EngineConfig
from kvspan.engine.build import resolve_engine

EXCHANGES = ("a2a", "ag_rs")


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
    traffic = [
        each
        for name in plan.traces
        for each in replays({**options, "dcp_comm_backend": exchange}, plan, name, told=told)
    ]
    return Measured(
        layout=layout,
        comm=elastic.comm,
        threshold=elastic.span_threshold,
        why=elastic.why.get("span_threshold", "--dcp-span-threshold says so."),
        cache_tokens=plan.rank_tokens,
        exchange=exchange,
        curve=curve,
        traffic=tuple(traffic),
    )


def best_exchange(curve: Sequence[CurvePoint]) -> str:
    """The exchange by which the static rival decoded faster, over all contexts; a2a if none was seen."""
    total_ms = {
        name: sum(p.tpot_ms for p in curve if (p.rival, p.exchange) == (STATIC, name))
        for name in {p.exchange for p in curve if p.rival == STATIC}
    }
    return min(total_ms, key=lambda name: total_ms[name], default=EXCHANGES[0])


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
    with fleets([(f"{rival} {exchange}".strip(), its) for rival, exchange, its in named]) as running:
        for turn, context in enumerate(plan.contexts):
            told(f"context {context}, batch {plan.batch}")
            rounds: list[list[list[float]]] = [[] for _ in running]
            for fleet in running:
                case = Case(context, plan.batch)
                fleet.fill(case, num_steps=plan.num_steps, seed=plan.seed + (turn << 32))
            before = [fleet.stats for fleet in running]
            for _ in range(plan.num_rounds):
                for fleet, its in zip(running, rounds, strict=True):
                    its.append(fleet.decode(plan.num_steps))
            for i, (rival, exchange, _) in enumerate(named):
                steps = running[i].stats.steps - before[i].steps
                exchanged = running[i].stats.exchange_steps - before[i].exchange_steps
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
