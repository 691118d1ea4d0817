"""A trace replayed by each rival in turn, with caches of equal bytes a rank."""

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import msgspec

from kvspan.bench.answered import Answered, answered
from kvspan.bench.figures import Figures, Latencies, figures, latencies
from kvspan.bench.record import Observed, Record
from kvspan.bench.rivals import REPLICAS, Layout, Plan, Rival, fleets, turns
from kvspan.bench.schedule import ClosedLoop
from kvspan.config.engine import EngineConfig
from kvspan.config.sizes import KV_DTYPE_BYTES
from kvspan.cost.memory import kv_bytes_per_token
from kvspan.engine.build import resolve_engine
from kvspan.errors import ConfigError
from kvspan.trace.row import Trace
from kvspan.trace.stats import K

LONG_TOKENS = 16 * K
"""Prompts of the mixed trace from which on they are long, before scaling."""


class Traffic(msgspec.Struct, frozen=True, kw_only=True):
    """What a rival did with a trace, in one round.

    Args:
        rival: its kind.
        layout: of its engine; empty of replicas.
        trace: its name.
        round: number of it.
        answered: whole answers, over the time from the first request to the last answer.
        found: the usual figures; throughput in it is of the time in which requests came.
        long: latencies of requests with long prompts.
        short: of the others.
        num_steps: of all engines.
        exchange_steps: those of them with a request on several ranks.
        shared_steps: those in which coordinates handed new keys of prompts round.
        plain_step_ms: mean time of a step without one; None = there was none.
        exchange_step_ms: of a step with one.
        spills: requests that left their home early.
        refused_share: of the output tokens that the trace asks for, those of refused requests.
    """

    rival: str
    layout: str
    trace: str
    round: int
    answered: Answered
    found: Figures
    long: Latencies
    short: Latencies
    num_steps: int
    exchange_steps: int
    shared_steps: int
    plain_step_ms: float | None
    exchange_step_ms: float | None
    spills: int
    refused_share: float

    @property
    def exchange_share(self) -> float:
        """Of its steps, those with a request on several ranks."""
        return self.exchange_steps / max(self.num_steps, 1)

    @property
    def bound(self) -> float | None:
        """Times as fast as it could be if all its steps had an exchange; None = all did, or none."""
        if self.plain_step_ms is None or self.exchange_step_ms is None:
            return None
        share = self.exchange_share
        mean_ms = share * self.exchange_step_ms + (1 - share) * self.plain_step_ms
        return self.exchange_step_ms / mean_ms


def replays(
    layouts: Sequence[Layout], plan: Plan, name: str, *, told: Callable[[str], None]
) -> Iterator[Traffic]:
    """Replays a trace, rival by rival and back again.

    Args:
        layouts: of as many ranks each.
        plan: what is measured.
        name: of the trace.
        told: called with what is being done.

    Raises:
        ConfigError: a rival cannot run, or the caches together do not hold a request.
    """
    trace = plan.trace(name)
    named = [_under_traffic(rival, trace, plan) for rival in turns(layouts)]
    with fleets(named) as running:
        for fleet in running:  # what runs for the first time takes longer
            begin = Trace(trace.rows[:2], trace.block_tokens)
            fleet.replay(begin, ClosedLoop(begin, users=2), seed=plan.seed - 1)
        in_turn = list(zip(named, running, strict=True))
        for number in range(plan.num_rounds):
            for rival, fleet in in_turn if number % 2 == 0 else in_turn[::-1]:
                told(f"{name} traffic, round {number + 1}: {fleet.name}")
                before = fleet.stats
                observed = fleet.replay(
                    trace, plan.schedule(trace), seed=plan.seed + number, stop_s=plan.stop_s
                )
                stats = fleet.stats
                yield _of_round(
                    rival,
                    plan,
                    name,
                    number,
                    observed,
                    trace,
                    num_ranks=len(named[0].engines),
                    spills=stats.spills - before.spills,
                    shared_steps=stats.shared_steps - before.shared_steps,
                )


def _under_traffic(rival: Rival, trace: Trace, plan: Plan) -> Rival:
    """A rival with a cache of equal bytes a rank. A replica refuses what it cannot hold at all."""
    longest = max(row.input_length + row.output_length for row in trace.rows)
    asked = [{**each, "max_num_seqs": plan.users} for each in rival.engines]
    resolved, _ = resolve_engine(EngineConfig.from_mapping(asked[0]))
    cache_tokens = plan.rank_tokens(resolved.block_size)
    size = kv_bytes_per_token(resolved.model_config, kv_dtype_bytes=KV_DTYPE_BYTES[resolved.kv_dtype])
    holds = cache_tokens * (resolved.dcp_size if rival.kind != REPLICAS else 1)
    if rival.kind != REPLICAS and holds <= longest:
        raise ConfigError(
            f"{cache_tokens} tokens of cache (--cache-tokens) on each of {resolved.dcp_size} ranks do "
            f"not hold the longest request of {longest} tokens: raise it, or raise --scale."
        )
    limits = {"kv_cache_memory": cache_tokens * size, "max_model_len": min(longest + 1, holds)}
    return replace(rival, engines=[{**each, **limits} for each in asked])


def _of_round(
    rival: Rival,
    plan: Plan,
    name: str,
    number: int,
    observed: Observed,
    trace: Trace,
    *,
    num_ranks: int,
    spills: int,
    shared_steps: int,
) -> Traffic:
    outputs = [row.output_length for row in trace.rows]
    found = figures(observed, num_ranks=num_ranks, scale=plan.scale)

    def of_length(long: bool) -> Latencies:
        some = [r for r in observed.records if _is_long(r, plan.scale) == long]
        return latencies(some, found.window_s)

    def step_ms(exchanged: bool) -> float | None:
        some = [s.lasts_s * 1e3 for s in observed.samples if bool(s.exchanged) == exchanged]
        return statistics.mean(some) if some else None

    return Traffic(
        rival=rival.kind,
        layout=rival.layout,
        trace=name,
        round=number,
        answered=answered(observed, plan.bounds),
        found=found,
        long=of_length(True),
        short=of_length(False),
        num_steps=len(observed.samples),
        exchange_steps=sum(bool(s.exchanged) for s in observed.samples),
        plain_step_ms=step_ms(False),
        exchange_step_ms=step_ms(True),
        spills=spills,
        shared_steps=shared_steps,
        refused_share=sum(outputs[r.index] for r in observed.records if r.error) / sum(outputs),
    )


def _is_long(record: Record, scale: int) -> bool:
    return record.input_tokens * scale >= LONG_TOKENS
