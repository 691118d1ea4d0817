"""Bytes of known models, blocks of budgets, and a plan that admits just what fits the whole group."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvspan.config.engine import EngineConfig
from kvspan.config.model import ModelConfig, parse_model_config
from kvspan.config.resolved import Resolved
from kvspan.config.sizes import parse_bytes
from kvspan.cost.choose import Machine, resolve
from kvspan.cost.memory import (
    blocks_for_budget,
    blocks_for_tokens,
    capacity_tokens,
    kv_bytes_per_global_token,
    kv_bytes_per_local_token,
    kv_bytes_per_token,
    plan_cache,
)
from kvspan.errors import ConfigError
from kvspan.layout import CacheLayout
from kvspan.step import RankReport
from kvspan.topology import Topology

MODELS = Path(__file__).parents[2] / "data" / "models"
SMOL_TOKEN_BYTES = 23040


def model(name: str = "SmolLM2-135M") -> ModelConfig:
    return parse_model_config(json.loads((MODELS / f"{name}.json").read_text()), where=name)


def resolved(*, gpus: int = 0, **asked: Any) -> Resolved:
    config = EngineConfig.from_mapping({"model": "m", **asked})
    return resolve(config, model(), Machine(cores=8, num_gpus=gpus))


def reports(plan_for: Resolved, *free: int, weights: int = 0) -> list[RankReport]:
    """One a rank; `free` bytes of each, the last one of all others."""
    token = kv_bytes_per_local_token(plan_for.model_config, plan_for.topology, kv_dtype_bytes=2)
    sizes = [*free, *[free[-1]] * plan_for.topology.world_size][: plan_for.topology.world_size]
    return [RankReport(rank, weights, size, token) for rank, size in enumerate(sizes)]


@pytest.mark.parametrize(
    ("name", "num_bytes"),
    [
        ("SmolLM2-135M", 23040),
        ("Llama-3.1-8B", 131072),
        ("Llama-3.1-70B", 327680),
        ("Qwen2.5-72B", 327680),
        ("Qwen3-235B-A22B", 192512),
        ("DeepSeek-V2-Lite", 31104),
        ("DeepSeek-R1", 70272),
        ("Kimi-K2.6", 70272),
    ],
)
def test_bytes_per_token_of_known_models(name: str, num_bytes: int) -> None:
    assert kv_bytes_per_token(model(name), kv_dtype_bytes=2) == num_bytes
    assert kv_bytes_per_token(model(name), kv_dtype_bytes=4) == 2 * num_bytes


@pytest.mark.parametrize(
    ("name", "tp_size", "dcp_size", "local", "on_average"),
    [
        ("DeepSeek-R1", 8, 1, 70272, 70272.0),  # one latent for all 128 heads
        ("DeepSeek-R1", 8, 8, 70272, 8784.0),
        ("Qwen3-235B-A22B", 8, 1, 48128, 48128.0),
        ("Qwen3-235B-A22B", 8, 2, 48128, 24064.0),
        ("Llama-3.1-70B", 8, 1, 40960, 40960.0),  # one of 8 KV heads
        ("Llama-3.1-70B", 8, 8, 327680, 40960.0),  # decoupled: all heads of an 8th of the tokens
        ("Llama-3.1-70B", 16, 1, 40960, 40960.0),  # a copy, which DCP then shares out
        ("Llama-3.1-70B", 16, 2, 40960, 20480.0),
        ("SmolLM2-135M", 7, 7, 23040, 23040 / 7),
    ],
)
def test_bytes_per_rank(name: str, tp_size: int, dcp_size: int, local: int, on_average: float) -> None:
    topology = Topology(tp_size=tp_size, dcp_size=dcp_size)
    assert kv_bytes_per_local_token(model(name), topology, kv_dtype_bytes=2) == local
    assert kv_bytes_per_global_token(model(name), topology, kv_dtype_bytes=2) == on_average


@given(st.integers(0, 1 << 45), st.integers(1, 64), st.integers(1, 1 << 20))
def test_a_budget_is_used_up_to_less_than_a_block(budget: int, eighths: int, token_bytes: int) -> None:
    blocks = blocks_for_budget(budget, block_size=8 * eighths, bytes_per_token=token_bytes)
    block_bytes = 8 * eighths * token_bytes
    assert blocks * block_bytes <= budget < (blocks + 1) * block_bytes


def test_no_budget_is_no_block() -> None:
    assert blocks_for_budget(-5, block_size=8, bytes_per_token=1) == 0


@given(
    num_tokens=st.integers(1, 3000),
    num_requests=st.integers(1, 5),
    dcp_size=st.integers(1, 9),
    interleave=st.sampled_from([1, 4, 16]),
)
def test_blocks_for_tokens_are_enough_and_no_more(
    num_tokens: int, num_requests: int, dcp_size: int, interleave: int
) -> None:
    layout = CacheLayout(block_size=16, dcp_size=dcp_size, interleave=interleave)
    blocks = blocks_for_tokens(num_tokens, layout, num_requests=num_requests)
    units = sum(1 for _ in range(num_requests) for _ in range(0, num_tokens, layout.unit_tokens))
    assert blocks * layout.num_pools >= units > (blocks - 1) * layout.num_pools
    assert capacity_tokens(blocks, layout) >= num_requests * num_tokens


@pytest.mark.parametrize(("interleave", "hit_unit"), [(16, 16), (4, 128)])
def test_admission_counts_the_whole_group(interleave: int, hit_unit: int) -> None:
    """64 tokens a rank and W = 8 hold a prompt of 200 tokens and 10 new ones: 512 in all."""
    run = resolved(
        tensor_parallel_size=8,
        decode_context_parallel_size=8,
        cp_kv_cache_interleave_size=interleave,
        max_model_len=210,
        kv_cache_memory=64 * SMOL_TOKEN_BYTES + 1,
    )
    plan = plan_cache(reports(run, 1 << 30), run)
    assert (plan.blocks_per_rank, plan.tokens_per_rank, plan.tokens_total) == (4, 64, 512)
    assert plan.bytes_per_rank == 64 * SMOL_TOKEN_BYTES
    assert plan.hit_unit == hit_unit
    assert plan.why == "--kv-cache-memory gives each rank 1.4 MiB."


def test_the_smallest_rank_sets_the_size() -> None:
    run = resolved(tensor_parallel_size=2, decode_context_parallel_size=2, gpus=2)
    free = [10**9, 5 * 10**8]
    plan = plan_cache(reports(run, *free), run)
    assert plan.blocks_per_rank == int(0.9 * free[1]) // (16 * SMOL_TOKEN_BYTES)


def test_a_host_is_shared_by_its_ranks() -> None:
    run = resolved(tensor_parallel_size=4, decode_context_parallel_size=4)
    plan = plan_cache(reports(run, 4 * 10**9, 3 * 10**9), run)
    assert plan.blocks_per_rank == int(0.4 * 3 * 10**9) // 4 // (16 * SMOL_TOKEN_BYTES)
    assert plan.why == "0.4 of the 715.3 MiB of free memory that is each rank's part is 286.1 MiB."


def test_an_explicit_fraction_holds_on_any_device() -> None:
    run = resolved(gpu_memory_utilization=0.5)
    plan = plan_cache(reports(run, 10**9), run)
    assert plan.blocks_per_rank == 5 * 10**8 // (16 * SMOL_TOKEN_BYTES)


def test_weights_count_towards_the_fraction_of_a_gpu() -> None:
    run = resolved(gpus=1)
    plan = plan_cache(reports(run, 10**9, weights=10**9), run)
    assert plan.blocks_per_rank == (int(0.9 * 2 * 10**9) - 10**9) // (16 * SMOL_TOKEN_BYTES)
    assert plan.why.startswith("0.9 of each GPU, less the weights, is 762.9 MiB;")


def test_a_fraction_takes_no_more_than_running_requests_can_use() -> None:
    run = resolved(
        tensor_parallel_size=2, decode_context_parallel_size=2, max_num_seqs=3, max_model_len=100
    )
    plan = plan_cache(reports(run, 1 << 40), run)
    assert plan.blocks_per_rank == 11  # 3 requests x 7 blocks on 2 ranks
    assert plan.why.startswith("3 requests of 100 tokens can use no more; each rank could have ")


def test_an_amount_that_was_asked_for_is_taken() -> None:
    run = resolved(max_num_seqs=1, max_model_len=16, kv_cache_memory="100MiB")
    assert plan_cache(reports(run, 1 << 30), run).blocks_per_rank == 284


@pytest.mark.parametrize(("gpus", "room"), [(0, "512 MiB"), (2, "1 GiB")])
def test_more_than_there_is(gpus: int, room: str) -> None:
    run = resolved(
        tensor_parallel_size=2, decode_context_parallel_size=2, kv_cache_memory="2GiB", gpus=gpus
    )
    with pytest.raises(ConfigError) as caught:
        plan_cache(reports(run, 1 << 30), run)
    assert str(caught.value) == (
        "--kv-cache-memory asks for 2 GiB on each of 2 ranks, but a rank has "
        f"{room} free: lower it to at most {1024 // (1 if gpus else 2)}MiB."
    )


def test_too_small_for_one_request() -> None:
    run = resolved(
        tensor_parallel_size=8,
        decode_context_parallel_size=8,
        kv_cache_memory=64 * SMOL_TOKEN_BYTES,
        max_model_len=513,
    )
    with pytest.raises(ConfigError) as caught:
        plan_cache(reports(run, 1 << 30), run)
    assert str(caught.value) == (
        "The KV cache of 8 x 1.4 MiB holds 512 tokens, but a request of --max-model-len 513 needs "
        "1.8 MiB on each rank: raise --kv-cache-memory to at least 1800KiB, or lower --max-model-len "
        "to at most 512."
    )


def test_no_way_out_that_leads_nowhere() -> None:
    run = resolved(kv_cache_memory=1)
    with pytest.raises(ConfigError) as caught:
        plan_cache(reports(run, 1 << 20), run)
    assert "0 tokens" in str(caught.value)
    assert "--kv-cache-memory to" not in str(caught.value)  # there is no 180 MiB to be had
    assert "--max-model-len to" not in str(caught.value)  # nothing fits in one byte
    assert "--decode-context-parallel-size" in str(caught.value)


@settings(max_examples=60, deadline=None)
@given(
    dcp_size=st.sampled_from([1, 2, 3, 8]),
    interleave=st.sampled_from([1, 8, 16]),
    budget=st.integers(0, 400).map(lambda kib: 1 + kib * 10240),
    max_model_len=st.integers(2, 2000),
)
def test_each_way_out_leads_out(dcp_size: int, interleave: int, budget: int, max_model_len: int) -> None:
    layout = {
        "tensor_parallel_size": dcp_size,
        "decode_context_parallel_size": dcp_size,
        "cp_kv_cache_interleave_size": interleave,
    }

    def tokens_total(**changes: Any) -> int:
        asked = {"kv_cache_memory": budget, "max_model_len": max_model_len, **changes}
        run = resolved(**layout, **asked)
        return plan_cache(reports(run, 1 << 40), run).tokens_total

    try:
        assert tokens_total() >= max_model_len
    except ConfigError as refused:
        more, *fewer = re.findall(r"at most (\d+)|at least (\w+)", str(refused))
        enough = parse_bytes(more[1])
        assert tokens_total(kv_cache_memory=enough) >= max_model_len
        for lower, _ in fewer:
            assert tokens_total(max_model_len=int(lower)) == int(lower) < max_model_len
            with pytest.raises(ConfigError):
                tokens_total(max_model_len=int(lower) + 1)
        with pytest.raises(ConfigError):  # less by more than a block and the rounding
            tokens_total(kv_cache_memory=max(enough - (2 << 20), 1))
