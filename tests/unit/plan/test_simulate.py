"""The simulator is the engine: same steps and hits as with tokens, at real scale in seconds."""

import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvspan.clock import VirtualClock
from kvspan.config.engine import EngineConfig
from kvspan.cost.choose import Machine, resolve
from kvspan.cost.deployment import Deployment
from kvspan.cost.facts import find_device, load_devices
from kvspan.cost.steptime import StepCost
from kvspan.cost.weights import WeightDtypes, weight_dtypes
from kvspan.engine.core import EngineCore
from kvspan.plan.asked import PlanAsked
from kvspan.plan.load import Agents, quantile
from kvspan.plan.models import find_model
from kvspan.plan.replay import simulate
from kvspan.plan.search import search
from kvspan.plan.simulate import SimulatedRanks, Simulation, TraceKeys
from kvspan.request import SamplingParams
from kvspan.topology import Topology
from kvspan.trace.row import BLOCK_TOKENS, TraceRow


def cost_of(model: str, *, tp: int, dcp: int, weights: str = "auto", kv_bytes: int = 2) -> StepCost:
    found = find_model(model)
    dtypes = weight_dtypes(weights, found.raw, found.config)
    return StepCost(
        Deployment(
            model=found.config,
            device=find_device("B200-SXM", load_devices()),
            topology=Topology(tp_size=tp, dcp_size=dcp),
            dtypes=dtypes,
            kv_dtype_bytes=kv_bytes,
        )
    )


def simulation(cost: StepCost, *, block_tokens: int = BLOCK_TOKENS, **asked: Any) -> Simulation:
    t = cost.on.topology
    config = EngineConfig.from_mapping(
        {
            "model": "m",
            "device": "cuda",
            "tensor_parallel_size": t.tp_size,
            "decode_context_parallel_size": t.dcp_size,
            **asked,
        }
    )
    resolved = resolve(config, cost.on.model, Machine(cores=8, num_gpus=8))
    return Simulation(resolved, cost, block_tokens=block_tokens)


rows = st.lists(
    st.tuples(st.integers(0, 2), st.integers(1, 80), st.integers(1, 6)), min_size=1, max_size=12
)


@settings(max_examples=40, deadline=None)
@given(rows, st.sampled_from([(1, 16), (2, 16), (2, 8)]))
def test_counted_prompts_are_scheduled_and_hit_as_prompts_of_tokens_are(
    asked: list[tuple[int, int, int]], layout: tuple[int, int]
) -> None:
    """Prompts are prefixes of one of three texts: the same prefixes as ids of blocks of 16."""
    dcp, interleave = layout
    cost = cost_of("SmolLM2-135M", tp=dcp, dcp=dcp)
    flags: dict[str, Any] = {
        "max_model_len": 128,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 32,
        "kv_cache_memory": 23040 * 16 * 24,
        "cp_kv_cache_interleave_size": interleave,
    }
    counted = simulation(cost, block_tokens=16, **flags)
    clock = VirtualClock()
    told = EngineCore(counted.core.resolved, SimulatedRanks(cost, clock))
    for own, (text, length, output) in enumerate(asked):
        params = SamplingParams(max_tokens=output, ignore_eos=True, temperature=0)
        told.add([text * 1000 + i for i in range(length)], params, seed=0)
        whole, rest = divmod(length, 16)
        ids = tuple(text * 1000 + i for i in range(whole)) + ((9000 + own,) if rest else ())
        row = TraceRow(0.0, length, output, ids)
        unit = counted.core.resolved.cache_layout.unit_tokens
        keys = TraceKeys(row, block_tokens=16, unit_tokens=unit, own=own)
        counted.core.add_counted(length, params, keys=keys)
    while told.has_work:
        expected, found = told.step(), counted.core.step()
        assert [(e.request_id, e.num_cached_tokens, e.finish_reason) for e in found] == [
            (e.request_id, e.num_cached_tokens, e.finish_reason) for e in expected
        ]
        assert counted.clock.now_s() == clock.now_s()
        counted.core.check()
    assert not counted.core.has_work


def test_keys_beyond_the_ids_are_the_requests_own_and_wide_ids_are_distinct() -> None:
    def keys(own: int, *ids: int) -> TraceKeys:
        row = TraceRow(0.0, 2048, 1, ids)
        return TraceKeys(row, block_tokens=512, unit_tokens=64, own=own)

    assert keys(0, 1, 2).key(15) == keys(1, 1, 2).key(15)
    assert keys(0, 1, 2).key(16) != keys(1, 1, 2).key(16)
    assert keys(0, 1).key(0) != keys(0, 1 + 2**32).key(0)
    assert keys(0, 1).key(0) != keys(0, 1).key(1)


def test_an_open_loop_keeps_the_traces_times() -> None:
    engine = simulation(cost_of("SmolLM2-135M", tp=1, dcp=1))
    asked = [TraceRow(1000.0 * i, 600, 4, (1, 100 + i)) for i in range(5)]
    replay = engine.open_loop(asked)
    assert [s.asked_s for s in replay.served] == [0, 1, 2, 3, 4]
    assert all(s.asked_s < s.first_s < s.ended_s for s in replay.served)
    assert 4 < replay.ended_s < 5
    assert [s.num_cached_tokens for s in replay.served] == [0, 512, 512, 512, 512]


def test_what_is_too_long_is_counted_with_the_reason() -> None:
    engine = simulation(cost_of("SmolLM2-135M", tp=1, dcp=1), max_model_len=100)
    replay = engine.closed_loop([iter([TraceRow(0, 100, 1), TraceRow(0, 50, 1)])], num_requests=2)
    assert len(replay.served) == 1
    assert replay.refused == {"prompts of --max-model-len 100 tokens or more are refused": 1}


def test_agents_extend_their_prompts_and_share_what_their_group_does() -> None:
    agents = Agents(
        input_tokens=((0.0, 4000), (1.0, 60000)),
        output_tokens=10,
        new_tokens=700,
        turns=5,
        shared_prefix=0.5,
    )
    users = agents.users(3)
    taken = [[next(user) for _ in range(12)] for user in users]
    again = [[next(user) for _ in range(12)] for user in agents.users(3)]
    assert taken == again
    for mine in taken:
        for before, after in pairwise(mine):
            if after.input_length == before.input_length + 700:
                kept = before.input_length // BLOCK_TOKENS
                assert after.hash_ids[:kept] == before.hash_ids[:kept]
            assert len(after.hash_ids) == -(-after.input_length // BLOCK_TOKENS)
    firsts = {mine[0].hash_ids[0] for mine in taken}
    assert firsts == {0}


def test_quantiles_are_met() -> None:
    points = ((0.0, 1000), (0.5, 67000), (1.0, 1_000_000))
    assert [round(quantile(points, p[0])) for p in points] == [1000, 67000, 1_000_000]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_3000_requests_of_512_agents_take_under_60_seconds_of_one_core() -> None:
    """8 x B200, Kimi K2.6, prompts of 67K, outputs of 400, prefix cache on."""
    cost = cost_of("Kimi-K2.6", tp=8, dcp=8, weights="nvfp4", kv_bytes=1)
    engine = simulation(
        cost, block_size=64, kv_cache_dtype="fp8", max_num_seqs=1024, max_num_batched_tokens=8192
    )
    began_s = time.process_time()
    replay = engine.closed_loop(_agents(512), num_requests=3000)
    assert time.process_time() - began_s < 60
    assert replay.num_served >= 3000
    assert replay.hit_rate > 0.9


def _agents(num_users: int) -> list[Iterator[TraceRow]]:
    agents = Agents(
        input_tokens=((1.0, 67000),), output_tokens=400, new_tokens=1200, turns=20, shared_prefix=0.5
    )
    return agents.users(num_users)


def test_weights_are_those_of_bf16_unless_said() -> None:
    assert WeightDtypes() == weight_dtypes("auto", {}, find_model("llama-3.1-8b").config)


CODING = {"input": 67000, "output": 400, "shared_prefix": 0.5, "new_tokens": 1200, "turns": 20}


@pytest.mark.parametrize(
    ("model", "load", "users", "flags"),
    [
        ("kimi-k2.6", {**CODING, "weights_dtype": "nvfp4", "kv_cache_dtype": "fp8"}, 32, "-tp 8 -dcp 8"),
        ("llama-3.1-70b", {"input": 8000, "output": 500}, 1, "-tp 8 -dcp 8"),
        ("llama-3.1-70b", {"input": 8000, "output": 500}, 16, "-tp 4 -dcp 2 -pcp 2"),
        ("qwen3-235b-a22b", {"input": 4000, "output": 300}, 16, "-tp 8 -dcp 2"),
    ],
)
def test_closed_formulas_say_what_the_engine_does_while_there_is_room(
    model: str, load: dict[str, Any], users: int, flags: str
) -> None:
    run = {"concurrency": users, "requests": 6 * users, "max_num_batched_tokens": 8192}
    asked = PlanAsked.from_mapping({"model": model, **run, **load})
    device = find_device("B200-SXM", load_devices())
    plan = search(asked, find_model(model), device)
    planned = next(p for p in plan.planned if p.candidate.layout == flags)
    simulated, steady = simulate(plan, planned), planned.points[0].steady
    assert planned.points[0].output_tok_s_gpu == pytest.approx(simulated.output_tok_s_gpu, rel=0.1)
    assert steady.tpot_s == pytest.approx(simulated.tpot_s, rel=0.1)
    assert 0.6 < steady.ttft_s / simulated.ttft_s < 1.4
