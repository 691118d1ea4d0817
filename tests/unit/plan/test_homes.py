"""Ranks that are homes, simulated: local rows cost their home alone, and no exchange."""

from dataclasses import replace

import pytest

from kvspan.clock import VirtualClock
from kvspan.config.engine import EngineConfig
from kvspan.cost.choose import Machine, resolve
from kvspan.cost.deployment import Deployment
from kvspan.cost.facts import find_device, load_devices
from kvspan.cost.homes import NOTHING, HomesCost
from kvspan.cost.steptime import StepCost
from kvspan.cost.weights import copies_at_home, weight_dtypes
from kvspan.cost.work import decode_work
from kvspan.plan.homes import HomeRanks
from kvspan.plan.models import find_model
from kvspan.plan.simulate import Simulation
from kvspan.topology import Topology
from kvspan.trace.synth import PROFILES, synthesize


def deployment(model: str = "DeepSeek-R1", ranks: int = 8) -> Deployment:
    found = find_model(model)
    return Deployment(
        model=found.config,
        device=find_device("B200-SXM", load_devices()),
        topology=Topology(tp_size=ranks, dcp_size=ranks),
        dtypes=weight_dtypes("auto", found.raw, found.config),
        kv_dtype_bytes=1,
    )


def test_copies_of_projections_of_r1_are_nine_gigabytes_in_fp8() -> None:
    """Queries 1536 x 128 x 192 and outputs 128 x 128 x 7168 of 61 layers, 7 of 8 parts: 8.3e9."""
    on = deployment()
    params = copies_at_home(on.model, on.topology)
    assert params == 61 * (1536 * 128 * 192 + 128 * 128 * 7168) * 7 // 8
    more = HomesCost(on).local.weights.num_bytes - StepCost(on).weights.num_bytes
    assert more == pytest.approx(params, rel=1e-6)


def test_a_step_of_spread_rows_alone_is_an_ordinary_one() -> None:
    homes = HomesCost(deployment())
    spread = decode_work(20_000, batch=16)
    assert homes.parts_s(spread, []) == StepCost(homes.on).parts_s(spread)


def test_local_rows_exchange_nothing_and_their_home_reads_all_their_keys() -> None:
    homes = HomesCost(deployment())
    local = [decode_work(20_000, batch=2)] * 8
    parts = homes.parts_s(NOTHING, local)
    assert parts["exchange"] == parts["gather queries"] == 0
    spread = homes.parts_s(decode_work(20_000, batch=16), [])
    assert parts["attention"] == pytest.approx(spread["attention"], rel=1e-6)
    assert parts["mlp"] == spread["mlp"]
    many = homes.parts_s(NOTHING, [decode_work(100, batch=256)] * 8)
    all_spread = homes.parts_s(decode_work(100, batch=2048), [])
    assert many["projections"] < all_spread["projections"] / 2  # of 256 rows, and not of 2048
    crowded = homes.parts_s(NOTHING, [decode_work(20_000, batch=16), *[NOTHING] * 7])
    assert crowded["attention"] > parts["attention"]


def test_what_ranks_see_of_placements_is_what_the_engine_decides() -> None:
    on = replace(deployment("SmolLM2-135M", 2), dtypes=weight_dtypes("bf16", {}, deployment().model))
    config = EngineConfig.from_mapping(
        {
            "model": "m",
            "device": "cuda",
            "tensor_parallel_size": 2,
            "decode_context_parallel_size": 2,
            "dcp_mode": "elastic",
            "dcp_span_threshold": 600,
            "max_model_len": 8192,
            "max_num_seqs": 4,
            "kv_cache_memory": 23040 * 8192,
        }
    )
    resolved = resolve(config, on.model, Machine(cores=1, num_gpus=2))
    clock = VirtualClock()
    ranks = HomeRanks(HomesCost(on), clock)
    engine = Simulation(resolved, StepCost(on), block_tokens=512, clock=clock, ranks=ranks)
    rows = [row for row in synthesize(PROFILES["agentic"], num_rows=300).rows if row.input_length < 6000]
    replay = engine.closed_loop([iter(rows)] * 1, num_requests=len(rows))
    stats = engine.core.stats
    assert replay.num_served == len(rows)
    assert (ranks.num_steps, ranks.exchange_steps) == (stats.steps, stats.exchange_steps)
    assert 0 < stats.exchange_steps < stats.steps
