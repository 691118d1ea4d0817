"""A plan's candidates simulated: with the users that were asked about, or with a trace."""

import statistics
from dataclasses import dataclass

from kvspan.config.engine import EngineConfig
from kvspan.cost.choose import Machine, resolve
from kvspan.errors import ConfigError
from kvspan.plan.command import MANY_GPUS, Commands, stretched_model
from kvspan.plan.load import Agents
from kvspan.plan.search import Plan, Planned
from kvspan.plan.simulate import Replay, Simulation
from kvspan.trace.row import BLOCK_TOKENS, Trace

REQUESTS_PER_USER = 4
"""Of a simulation whose length nobody named: one to fill the cache, and some that count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """What a simulation of one replica says of all.

    Args:
        layout: as flags.
        concurrency: users of all replicas; None = requests came when the trace says.
        output_tok_s_gpu: tokens of output a second and GPU.
        computed_tok_s_gpu: tokens of prompts computed.
        total_tok_s_gpu: tokens of prompts and output, cached ones among them.
        hit_rate: share of prompts' tokens found in the cache.
        ttft_s: seconds to the first token, mean.
        ttft_p90_s: and the 90th percentile.
        tpot_s: seconds from a token to the next, mean.
        usage: share of the cache that requests held.
        waiting: share of the time in which a request waited for room.
        preemptions: requests that began again.
        num_served: requests of one replica.
        num_steps: steps of one replica.
        simulated_s: on the clock that was simulated.
        refused: why rows were not served, with how many.
    """

    layout: str
    concurrency: int | None
    output_tok_s_gpu: float
    computed_tok_s_gpu: float
    total_tok_s_gpu: float
    hit_rate: float
    ttft_s: float
    ttft_p90_s: float
    tpot_s: float
    usage: float
    waiting: float
    preemptions: int
    num_served: int
    num_steps: int
    simulated_s: float
    refused: dict[str, int]


def simulate(plan: Plan, planned: Planned, trace: Trace | None = None) -> Simulated:
    """Runs the engine's loop for one replica of a candidate.

    Args:
        plan: the question, and how many users ask.
        planned: the candidate.
        trace: requests, of which a replica gets every n-th; None = agents as the question has them.

    Raises:
        ConfigError: the trace has nothing for the candidate.
    """
    asked, replicas = plan.asked, planned.candidate.replicas
    users = asked.concurrency
    if users is None and trace is None:
        best = planned.best or planned.points[-1]
        users = best.concurrency
    config = engine_config(plan, planned, trace)
    engine = Simulation(
        resolve(
            config,
            stretched_model(plan.model.config, config),
            Machine(cores=1, num_gpus=MANY_GPUS, facts=plan.device),
        ),
        planned.cost,
        block_tokens=BLOCK_TOKENS if trace is None else trace.block_tokens,
    )
    per_replica = None if users is None else -(-users // replicas)
    replay = _run(engine, plan, per_replica, trace, replicas)
    if not replay.served:
        raise ConfigError(
            f"No request was served within --requests {asked.requests}: raise it."
            if asked.requests
            else f"No request of the trace could be served: {'; '.join(replay.refused)}."
        )
    return _simulated(planned, users, replay)


def engine_config(plan: Plan, planned: Planned, trace: Trace | None = None) -> EngineConfig:
    """The options with which kvspan would run a candidate.

    Args:
        plan: the question.
        planned: the candidate.
        trace: requests; unless the question says it, there is room for the longest of them, and a
            cache need not hold what the model could read but nobody asks. None = that there is.
    """
    limit = None
    if plan.asked.max_model_len is None and trace is not None:
        longest = max(row.input_length + row.output_length for row in trace.rows)
        limit = min(longest, plan.model.config.max_position_embeddings)
    return Commands(plan).config(planned, max_model_len=limit)


def agents_of(plan: Plan, *, longest: int) -> Agents:
    """The users that were asked about, with prompts that are all as long in the mean.

    Args:
        plan: the question.
        longest: tokens of a request at the most.
    """
    asked, load = plan.asked, plan.load
    return Agents(
        input_tokens=((1.0, load.input_tokens),),
        output_tokens=load.output_tokens,
        new_tokens=asked.new_tokens or 1,
        turns=asked.turns,
        shared_prefix=asked.shared_prefix,
        longest=longest - load.output_tokens,
    )


def _run(
    engine: Simulation, plan: Plan, per_replica: int | None, trace: Trace | None, replicas: int
) -> Replay:
    num_requests = plan.asked.requests
    if trace is None:
        assert per_replica is not None, "agents are so many"
        served = -(-num_requests // replicas) if num_requests else REQUESTS_PER_USER * per_replica
        agents = agents_of(plan, longest=engine.core.resolved.max_model_len)
        return engine.closed_loop(agents.users(per_replica), num_requests=served)
    rows = trace.rows[:num_requests][::replicas]
    if per_replica is None:
        return engine.open_loop(rows)
    queue = iter(rows)
    return engine.closed_loop([queue] * per_replica, num_requests=len(rows))


def _simulated(planned: Planned, users: int | None, replay: Replay) -> Simulated:
    gpu_s = replay.seconds * planned.candidate.topology.world_size
    ttft_s = sorted(s.first_s - s.asked_s for s in replay.served)
    computed = replay.input_tokens - replay.cached_tokens
    return Simulated(
        layout=planned.candidate.layout,
        concurrency=users,
        output_tok_s_gpu=replay.output_tokens / gpu_s,
        computed_tok_s_gpu=computed / gpu_s,
        total_tok_s_gpu=(replay.input_tokens + replay.output_tokens) / gpu_s,
        hit_rate=replay.hit_rate,
        ttft_s=statistics.mean(ttft_s),
        ttft_p90_s=ttft_s[round(0.9 * (len(ttft_s) - 1))],
        tpot_s=statistics.mean(s.tpot_s for s in replay.served),
        usage=replay.usage,
        waiting=replay.waiting,
        preemptions=replay.num_preemptions,
        num_served=replay.num_served,
        num_steps=replay.num_steps,
        simulated_s=replay.ended_s,
        refused=replay.refused,
    )
