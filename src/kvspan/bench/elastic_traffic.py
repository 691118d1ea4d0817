"""A trace replayed by each rival in turn, with caches of equal bytes a rank."""

import statistics
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from kvspan.bench.figures import Figures, figures
from kvspan.bench.record import Observed
from kvspan.bench.rivals import REPLICAS, Options, Plan, fleets, rivals
from kvspan.bench.schedule import ClosedLoop
from kvspan.config.engine import EngineConfig
from kvspan.config.sizes import KV_DTYPE_BYTES
from kvspan.cost.memory import kv_bytes_per_token
from kvspan.engine.build import resolve_engine
from kvspan.errors import ConfigError
from kvspan.trace.row import Trace
from kvspan.trace.stats import K, Spread

LONG_TOKENS = 16 * K
"""Prompts of the mixed trace from which on they are long, before scaling."""


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
        shared_steps: those in which coordinates handed new keys of prompts round.
        plain_step_ms: mean time of a step without one; None = there was none.
        exchange_step_ms: of a step with one.
        spills: requests that left their home early.
        refused_share: of the output tokens that the trace asks for, those of refused requests.
    """

    rival: str
    trace: str
    round: int
    found: Figures
    long_tpot_ms: Spread | None
    short_tpot_ms: Spread | None
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
        """How many times faster its mean step is than if all had an exchange; None = nobody knows."""
        if self.plain_step_ms is None or self.exchange_step_ms is None:
            return None
        share = self.exchange_share
        mean_ms = share * self.exchange_step_ms + (1 - share) * self.plain_step_ms
        return self.exchange_step_ms / mean_ms


def replays(
    options: Options, plan: Plan, name: str, *, told: Callable[[str], None]
) -> Iterator[Traffic]:
    """Replays a trace, rival by rival and back again.

    Args:
        options: of the elastic engine.
        plan: what is measured.
        name: of the trace.
        told: called with what is being done.

    Raises:
        ConfigError: a rival cannot run, or the caches together do not hold a request.
    """
    trace = plan.trace(name)
    named = _under_traffic(options, trace, plan.users, plan.rank_tokens)
    with fleets(list(named.items())) as running:
        for fleet in running:  # what runs for the first time takes longer
            begin = Trace(trace.rows[:2], trace.block_tokens)
            fleet.replay(begin, ClosedLoop(begin, users=2), seed=plan.seed - 1)
        for number in range(plan.num_rounds):
            for fleet in running if number % 2 == 0 else running[::-1]:
                told(f"{name} traffic, round {number + 1}: {fleet.name}")
                before = fleet.stats
                observed = fleet.replay(
                    trace, plan.schedule(trace), seed=plan.seed + number, stop_s=plan.stop_s
                )
                stats = fleet.stats
                yield _of_round(
                    fleet.name,
                    name,
                    number,
                    observed,
                    plan.scale,
                    trace,
                    num_ranks=len(named[REPLICAS]),
                    spills=stats.spills - before.spills,
                    shared_steps=stats.shared_steps - before.shared_steps,
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
    trace: Trace,
    *,
    num_ranks: int,
    spills: int,
    shared_steps: int,
) -> Traffic:
    outputs = [row.output_length for row in trace.rows]

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
        shared_steps=shared_steps,
        refused_share=sum(outputs[r.index] for r in observed.records if r.error) / sum(outputs),
    )
