"""A span for each request beside its rivals: whole replicas, and a span for all.

    curve       seconds of a decoded token by length of context, over made-up keys
    traffic     a trace, by users who ask again when they are answered or at a rate; the KV cache of a
                rank holds about one long request

All run in the same process by turns, so a machine that slows down slows all of them.
"""

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import msgspec

from kvspan.bench.contender import ROOM_TOKENS, Case
from kvspan.bench.elastic_traffic import Traffic, replays
from kvspan.bench.rivals import ELASTIC, STATIC, Layout, Plan, Rival, fleets, rivals, turns
from kvspan.config.engine import EngineConfig
from kvspan.engine.build import resolve_engine

EXCHANGES = ("a2a", "ag_rs")


class CurvePoint(msgspec.Struct, frozen=True, kw_only=True):
    """What a rival needs for a token.

    Args:
        rival: its kind.
        layout: of its engine; empty of replicas.
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
    layout: str
    exchange: str
    context: int
    batch: int
    tpot_ms: float
    p90_ms: float
    ratio: float
    worst_ratio: float
    exchange_share: float


class Home(msgspec.Struct, frozen=True, kw_only=True):
    """A layout, and when its elastic engine leaves requests at home.

    Args:
        layout: flags of static and elastic.
        threshold: tokens up to which elastic keeps a request at home.
        why: where that is from.
        exchange: the static rival's best.
    """

    layout: str
    threshold: int
    why: str
    exchange: str


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """Layouts of as many ranks over one transport.

    Args:
        homes: of each layout, in order.
        comm: transport.
        cache_tokens: of a rank, under traffic.
        curve: by context, then rival.
        traffic: by trace, round and rival.
    """

    homes: tuple[Home, ...]
    comm: str
    cache_tokens: int
    curve: tuple[CurvePoint, ...]
    traffic: tuple[Traffic, ...]


def measure(
    layouts: Sequence[Layout], plan: Plan, *, told: Callable[[str], None] = lambda _: None
) -> Measured:
    """Measures layouts and their rivals, all by turns.

    Args:
        layouts: of as many ranks each, over one transport. Options are of the elastic engine, but for
            sizes that the plan decides; those of its rivals follow, and of replicas those of the first.
        plan: what is measured.
        told: called with what is being done.

    Raises:
        ConfigError: a rival cannot run, or its cache does not hold a case.
        ModelError: the model cannot be found or read.
    """
    elastic = [
        resolve_engine(EngineConfig.from_mapping(rivals(options)[ELASTIC][0]))[0]
        for _, options in layouts
    ]
    curve = tuple(_curve(layouts, plan, told)) if plan.contexts else ()
    homes = tuple(
        Home(
            layout=name,
            threshold=resolved.span_threshold,
            why=resolved.why.get("span_threshold", "--dcp-span-threshold says so."),
            exchange=best_exchange(curve, name),
        )
        for (name, _), resolved in zip(layouts, elastic, strict=True)
    )
    best = [
        (name, {**options, "dcp_comm_backend": home.exchange})
        for (name, options), home in zip(layouts, homes, strict=True)
    ]
    traffic = [each for name in plan.traces for each in replays(best, plan, name, told=told)]
    return Measured(
        homes=homes,
        comm=elastic[0].comm,
        cache_tokens=plan.rank_tokens(elastic[0].block_size),
        curve=curve,
        traffic=tuple(traffic),
    )


def best_exchange(curve: Sequence[CurvePoint], layout: str) -> str:
    """The exchange by which a layout's static decoded faster over all contexts; a2a if none was seen."""
    static = [p for p in curve if (p.rival, p.layout) == (STATIC, layout)]
    total_ms = {
        name: sum(p.tpot_ms for p in static if p.exchange == name)
        for name in {p.exchange for p in static}
    }
    return min(total_ms, key=lambda name: total_ms[name], default=EXCHANGES[0])


def _curve(layouts: Sequence[Layout], plan: Plan, told: Callable[[str], None]) -> Iterator[CurvePoint]:
    """Decodes each context by turns."""
    sizes = {
        "max_model_len": max(plan.contexts) + plan.num_steps + ROOM_TOKENS,
        "max_num_seqs": 2 * plan.batch,
        "enable_prefix_caching": True,
    }
    named = _by_exchange([(name, {**options, **sizes}) for name, options in layouts])
    with fleets(named) as running:
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
            for i, rival in enumerate(named):
                steps = running[i].stats.steps - before[i].steps
                exchanged = running[i].stats.exchange_steps - before[i].exchange_steps
                yield _point(rival, context, plan.batch, rounds[i], rounds[0], exchanged / steps)


def _by_exchange(layouts: Sequence[Layout]) -> list[Rival]:
    """Everybody, static once by each exchange."""
    found: list[Rival] = []
    for rival in turns(layouts):
        ways = EXCHANGES if rival.kind == STATIC else EXCHANGES[:1] if rival.kind == ELASTIC else ("",)
        for way in ways:
            engines = rival.engines
            if rival.kind == STATIC:
                engines = [{**each, "dcp_comm_backend": way} for each in engines]
            found.append(replace(rival, engines=engines, exchange=way))
    return found


def _point(
    rival: Rival,
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
        rival=rival.kind,
        layout=rival.layout,
        exchange=rival.exchange,
        context=context,
        batch=batch,
        tpot_ms=statistics.median(seconds) * 1e3,
        p90_ms=seconds[round(0.9 * (len(seconds) - 1))] * 1e3,
        ratio=statistics.median(ratios),
        worst_ratio=max(ratios),
        exchange_share=exchange_share,
    )
