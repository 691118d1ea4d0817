"""Every "auto" and its reason, every refusal, every flag without effect; and the bytes behind them."""

import json
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvspan.config.engine import EngineConfig
from kvspan.config.model import ModelConfig, parse_model_config
from kvspan.config.resolved import Resolved
from kvspan.cost.choose import Machine, resolve
from kvspan.cost.traffic import (
    a2a_bytes_per_row,
    ag_rs_bytes_per_row,
    query_gather_bytes_per_row,
)
from kvspan.errors import ConfigError, LayoutError
from kvspan.layout import CacheLayout
from kvspan.topology import Topology

MODELS = Path(__file__).parents[2] / "data" / "models"


def model(name: str = "SmolLM2-135M", **overrides: Any) -> ModelConfig:
    raw = json.loads((MODELS / f"{name}.json").read_text())
    return parse_model_config({**raw, **overrides}, where=name)


def chosen(*, of: ModelConfig | None = None, cores: int = 8, gpus: int = 0, **asked: Any) -> Resolved:
    config = EngineConfig.from_mapping({"model": "m", **asked})
    return resolve(config, of or model(), Machine(cores=cores, num_gpus=gpus))


def ranks(tp_size: int, dcp_size: int) -> dict[str, int]:
    return {"tensor_parallel_size": tp_size, "decode_context_parallel_size": dcp_size}


def test_what_runs_when_nothing_is_asked() -> None:
    run = chosen()
    assert run.topology == Topology(tp_size=1, dcp_size=1)
    assert run.cache_layout == CacheLayout(block_size=16, dcp_size=1, interleave=16)
    assert (run.model, run.tokenizer, run.device, run.comm) == ("m", "m", "cpu", "shm")
    assert (run.dtype, run.kv_dtype) == ("bfloat16", "bfloat16")
    assert (run.max_model_len, run.max_num_batched_tokens, run.max_num_seqs) == (8192, 2048, 256)
    assert (run.executor, run.num_threads) == ("inprocess", 8)
    assert (run.kv_budget_bytes, run.kv_fraction) == (None, 0.4)
    assert run.notes == ()


def test_nothing_is_left_to_auto_and_each_choice_has_its_reason() -> None:
    run = chosen(**ranks(4, 4))
    values = msgspec.structs.asdict(run)
    assert [name for name, value in values.items() if value in ("auto", None)] == [
        "load_format",  # the loader tells from the files
        "kv_budget_bytes",
    ]
    assert set(run.why) - {"layout"} == {
        *("interleave", "exchange", "replicate_q", "device", "comm", "dtype", "kv_dtype"),
        "prefill_strategy",
        *("max_model_len", "max_num_batched_tokens", "mixed_chunk_size", "max_num_seqs"),
        *("executor", "num_threads", "kv_fraction"),
    }
    assert all(sentence.endswith(".") and "\n" not in sentence for sentence in run.why.values())


def test_what_was_asked_is_taken_without_a_reason() -> None:
    asked = {
        "cp_kv_cache_interleave_size": 4,
        "dcp_comm_backend": "ag_rs",
        "dcp_q_replicate": "off",
        "prefill_strategy": "allgather_kv",
        "device": "cpu",
        "comm": "gloo",
        "dtype": "float32",
        "kv_cache_dtype": "float16",
        "max_model_len": 100,
        "max_num_batched_tokens": 64,
        "mixed_chunk_size": 32,
        "max_num_seqs": 5,
        "distributed_executor_backend": "mp",
        "num_threads": 3,
        "gpu_memory_utilization": 0.7,
        "tokenizer": "t",
        "step_timeout": 9,
        "enable_prefix_caching": False,
        "seed": 4,
    }
    run = chosen(**ranks(2, 2), **asked)
    assert (run.interleave, run.exchange, run.replicate_q) == (4, "ag_rs", False)
    assert (run.dtype, run.kv_dtype, run.max_model_len) == ("float32", "float16", 100)
    assert (run.max_num_batched_tokens, run.mixed_chunk_size, run.max_num_seqs) == (64, 32, 5)
    assert (run.executor, run.num_threads, run.kv_fraction) == ("mp", 3, 0.7)
    assert (run.tokenizer, run.step_timeout_s, run.seed) == ("t", 9.0, 4)
    assert not run.enable_prefix_caching
    assert set(run.why) == {"layout"}
    assert run.notes == ()


def test_it_crosses_a_process() -> None:
    run = chosen(**ranks(4, 2), of=model("Llama-3.1-8B"), kv_cache_memory="1GiB")
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(run), type=Resolved) == run


@pytest.mark.parametrize(
    ("tp_size", "dcp_size", "replicate_q", "layout"),
    [
        (8, 1, False, "none: each rank keeps 1 of 8 KV heads for the whole of every sequence."),
        (16, 2, False, "copies: each rank keeps 1 of 8 KV heads for 1/2 of every sequence."),
        (8, 2, True, "decoupled: each rank keeps 2 of 8 KV heads for 1/2 of every sequence."),
        (8, 8, True, "decoupled: each rank keeps 8 of 8 KV heads for 1/8 of every sequence."),
    ],
)
def test_queries_are_replicated_where_a_rank_keeps_several_heads(
    tp_size: int, dcp_size: int, replicate_q: bool, layout: str
) -> None:
    run = chosen(of=model("Llama-3.1-70B"), **ranks(tp_size, dcp_size))
    assert run.replicate_q is replicate_q
    assert run.why["layout"] == layout


def test_the_layout_is_told_of_elastic_requests_too() -> None:
    run = chosen(of=model("Llama-3.1-8B"), **ranks(2, 2), dcp_mode="elastic")
    assert run.why["layout"].endswith(
        "for 1/2 of a sequence that spans ranks, and for all of one at home there."
    )


def test_the_exchange_is_chosen_by_bytes() -> None:
    run = chosen(of=model("Llama-3.1-70B"), **ranks(16, 2))  # 8 heads of 128 a group, 4 a piece
    assert run.exchange == "a2a"
    assert run.why["exchange"] == (
        f"a rank sends {4 * (128 * 2 + 4)} bytes a row and layer in one collective, and "
        f"{8 * 4 + 4 * 128 * 4} in the two of ag_rs."
    )


@given(
    num_heads=st.integers(1, 64),
    head_dim=st.sampled_from([8, 64, 96, 128]),
    dcp_size=st.integers(1, 16),
    dtype_bytes=st.sampled_from([2, 4]),
)
def test_one_all_to_all_never_sends_more_where_pieces_are_whole_heads(
    num_heads: int, head_dim: int, dcp_size: int, dtype_bytes: int
) -> None:
    heads = num_heads * dcp_size
    a2a = a2a_bytes_per_row(
        num_heads=heads, head_dim=head_dim, dcp_size=dcp_size, dtype_bytes=dtype_bytes
    )
    others = dcp_size - 1
    assert a2a == others * num_heads * (head_dim * dtype_bytes + 4)
    ag_rs = ag_rs_bytes_per_row(num_heads=heads, head_dim=head_dim, dcp_size=dcp_size)
    assert ag_rs == others * (heads * 4 + num_heads * head_dim * 4)
    assert a2a <= ag_rs
    gathered = query_gather_bytes_per_row(
        num_heads=heads, head_dim=head_dim, dcp_size=dcp_size, dtype_bytes=dtype_bytes
    )
    assert gathered == others * num_heads * head_dim * dtype_bytes


@given(num_heads=st.integers(1, 20), dcp_size=st.integers(1, 9))
def test_a_piece_that_begins_inside_a_head_carries_that_heads_lse(num_heads: int, dcp_size: int) -> None:
    """A naive twin: each of the flat elements asked for its piece and its head."""
    units = num_heads * 2  # of 8 elements, two to a head
    last_of = [units * (i + 1) // dcp_size for i in range(dcp_size)]
    piece_of = [next(i for i, last in enumerate(last_of) if unit < last) for unit in range(units)]
    sizes = []
    for piece in range(dcp_size):
        mine = [unit for unit in range(units) if piece_of[unit] == piece]
        sizes.append(2 * 8 * len(mine) + 4 * len({unit // 2 for unit in mine}))
    most = max(sum(sizes) - own for own in sizes)
    a2a = a2a_bytes_per_row(num_heads=num_heads, head_dim=16, dcp_size=dcp_size, dtype_bytes=2)
    assert a2a == most <= ag_rs_bytes_per_row(num_heads=num_heads, head_dim=16, dcp_size=dcp_size)


@pytest.mark.parametrize(
    ("checkpoint", "gpus", "dtype"),
    [
        ("bfloat16", 0, "bfloat16"),
        ("float32", 0, "float32"),
        ("float16", 1, "float16"),
        ("float16", 0, "bfloat16"),
        ("float8_e4m3fn", 0, "bfloat16"),
    ],
)
def test_dtype_is_the_checkpoints_where_it_can_be(checkpoint: str, gpus: int, dtype: str) -> None:
    run = chosen(of=model(torch_dtype=checkpoint), gpus=gpus)
    assert run.dtype == run.kv_dtype == dtype
    assert (checkpoint in run.why["dtype"]) == (checkpoint != dtype)


@pytest.mark.parametrize(
    ("tp_size", "gpus", "values"),
    [
        (1, 0, ("cpu", "shm", "inprocess", 0.4)),
        (2, 0, ("cpu", "shm", "mp", 0.4)),
        (1, 2, ("cuda", "nccl", "inprocess", 0.9)),
        (3, 3, ("cuda", "nccl", "mp", 0.9)),
    ],
)
def test_device_transport_and_executor(tp_size: int, gpus: int, values: tuple[object, ...]) -> None:
    run = chosen(gpus=gpus, **ranks(tp_size, tp_size))
    assert (run.device, run.comm, run.executor, run.kv_fraction) == values


@pytest.mark.parametrize(("cores", "tp_size", "threads"), [(8, 1, 8), (8, 3, 2), (2, 9, 1)])
def test_cores_are_shared_by_ranks(cores: int, tp_size: int, threads: int) -> None:
    assert chosen(cores=cores, **ranks(tp_size, tp_size)).num_threads == threads


@pytest.mark.parametrize(
    ("name", "cores", "asked", "tokens"),
    [
        ("SmolLM2-135M", 2, {}, 1264),  # 2 * 170 GFLOP/s / (2 * 134.5 M), about
        ("SmolLM2-135M", 8, {}, 2048),
        ("Llama-3.1-8B", 2, {}, 256),
        ("Llama-3.1-8B", 2, {"mixed_chunk_size": 1}, 1),
        ("SmolLM2-135M", 2, {"max_num_batched_tokens": 300}, 300),
        ("SmolLM2-135M", 2, {"max_num_batched_tokens": 300, "mixed_chunk_size": 400}, 300),
    ],
)
def test_streams_wait_for_a_second_of_prompts_or_a_few_tokens(
    name: str, cores: int, asked: dict[str, Any], tokens: int
) -> None:
    run = chosen(of=model(name), cores=cores, **asked)
    assert run.mixed_chunk_size == tokens


def test_a_chunk_over_a_step_is_told_to_bound_nothing() -> None:
    run = chosen(max_num_batched_tokens=300, mixed_chunk_size=400)
    assert "--mixed-chunk-size 400 bounds nothing" in run.why["mixed_chunk_size"]
    assert "mixed_chunk_size" not in chosen(max_num_batched_tokens=300, mixed_chunk_size=300).why


def test_a_gpu_computes_prompts_beside_streams_without_a_limit() -> None:
    run = resolve(
        EngineConfig.from_mapping({"model": "m"}), model("Llama-3.1-8B"), Machine(cores=8, num_gpus=1)
    )
    assert run.mixed_chunk_size == run.max_num_batched_tokens


@pytest.mark.parametrize(
    ("asked", "tokens", "seqs"),
    [
        ({}, 2048, 256),
        ({"max_num_seqs": 3000}, 3000, 3000),
        ({"max_num_batched_tokens": 100}, 100, 100),
        ({"enable_chunked_prefill": False}, 8192, 256),
        ({"enable_chunked_prefill": False, "max_model_len": 100}, 2048, 256),
        ({"enable_chunked_prefill": False, "max_num_batched_tokens": 8192}, 8192, 256),
    ],
)
def test_a_step_has_room_for_each_request_and_for_a_prompt_that_is_not_cut(
    asked: dict[str, Any], tokens: int, seqs: int
) -> None:
    run = chosen(**asked)
    assert (run.max_num_batched_tokens, run.max_num_seqs) == (tokens, seqs)


@pytest.mark.parametrize(
    ("asked", "gpus", "parts"),
    [
        (
            {"max_model_len": 8193},
            0,
            ["--max-model-len 8193", "8192", '{"max_position_embeddings": 8193}'],
        ),
        (
            {"enable_chunked_prefill": False, "max_num_batched_tokens": 8191},
            0,
            ["--max-num-batched-tokens 8191", "--max-model-len 8192", "--enable-chunked-prefill"],
        ),
        (
            {"max_num_seqs": 65, "max_num_batched_tokens": 64},
            0,
            ["--max-num-seqs 65", "--max-num-batched-tokens 64"],
        ),
        ({"device": "cuda"}, 0, ["--device cuda", "none", "use cpu"]),
        (
            ranks(3, 3),
            2,
            ["--tensor-parallel-size 3 needs 3 CUDA", "has 2", "lower it", "--device cpu"],
        ),
        (
            ranks(4, 8) | {"prefill_context_parallel_size": 2},
            4,
            [
                "--tensor-parallel-size 4 times --prefill-context-parallel-size 2 needs 8 CUDA devices",
                "has 4: lower one of them",
            ],
        ),
        ({"comm": "nccl"}, 0, ["--comm nccl", "--device cpu", "gloo"]),
        ({"comm": "gloo"}, 1, ["--comm gloo", "--device cuda", "nccl"]),
        ({"comm": "shm"}, 1, ["--comm shm", "--device cuda", "nccl"]),
    ],
)
def test_refused(asked: dict[str, Any], gpus: int, parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        chosen(gpus=gpus, **asked)
    assert all(part in str(caught.value) for part in parts), str(caught.value)


def test_without_shared_memory_ranks_talk_over_gloo() -> None:
    machine = Machine(cores=2, no_shm="there is no native extension")
    run = resolve(EngineConfig.from_mapping({"model": "m"}), model(), machine)
    assert run.comm == "gloo"
    assert run.why["comm"] == "ranks compute on cpu, and there is no native extension."
    with pytest.raises(
        ConfigError, match=r"--comm shm cannot run: there is no native extension\. Use gloo"
    ):
        resolve(EngineConfig.from_mapping({"model": "m", "comm": "shm"}), model(), machine)


def test_a_stretched_model_takes_a_longer_context() -> None:
    stretched = model(max_position_embeddings=8193)
    assert chosen(of=stretched, max_model_len=8193).max_model_len == 8193


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (ranks(8, 3), "tp_not_divisible_by_dcp"),
        (ranks(2, 1), "heads_not_divisible_by_attention_tp"),
        ({**ranks(2, 2), "cp_kv_cache_interleave_size": 12}, "interleave_does_not_divide_block"),
        ({"cp_kv_cache_interleave_size": 32}, "interleave_does_not_divide_block"),
    ],
)
def test_layouts_that_do_not_fit(asked: dict[str, int], reason: str) -> None:
    with pytest.raises(LayoutError) as caught:
        chosen(**asked)
    assert caught.value.reason == reason
    assert "fit: " in str(caught.value) or "fits: " in str(caught.value)


@pytest.mark.parametrize(
    ("asked", "flag"),
    [
        ({"dcp_comm_backend": "a2a"}, "--dcp-comm-backend"),
        ({"dcp_q_replicate": "on"}, "--dcp-q-replicate"),
        ({"prefill_strategy": "allgather_kv"}, "--prefill-strategy"),
        ({"cp_kv_cache_interleave_size": 8}, "--cp-kv-cache-interleave-size"),
        ({"comm": "gloo"}, "--comm"),
        ({"kv_cache_memory": "1GiB", "gpu_memory_utilization": 0.5}, "--gpu-memory-utilization"),
    ],
)
def test_a_flag_without_effect_gets_one_line(asked: dict[str, Any], flag: str) -> None:
    (note,) = chosen(**asked).notes
    assert note.startswith(f"{flag} has no effect: ")
    assert note.endswith(".")


def test_an_amount_of_memory_leaves_no_fraction_to_explain() -> None:
    run = chosen(kv_cache_memory="1GiB")
    assert run.kv_budget_bytes == 1 << 30
    assert "kv_fraction" not in run.why
    assert math.isclose(run.kv_fraction, 0.4)


def latent(num_heads: int) -> ModelConfig:
    return model("DeepSeek-V2-Lite", num_attention_heads=num_heads)


def test_latent_attention_has_one_kv_head_whatever_its_config_says() -> None:
    run = chosen(of=model("Kimi-K2.6"), **ranks(8, 8))
    assert run.why["layout"].startswith("copies: each rank keeps 1 of 1 KV heads for 1/8")


def test_a_scatter_of_latents_needs_whole_heads() -> None:
    assert chosen(of=latent(16), dcp_comm_backend="ag_rs", **ranks(8, 8)).exchange == "ag_rs"
    assert chosen(of=latent(9), **ranks(2, 2)).exchange == "a2a"
    with pytest.raises(ConfigError) as caught:
        chosen(of=latent(9), dcp_comm_backend="ag_rs", **ranks(2, 2))
    assert str(caught.value) == (
        "--dcp-comm-backend ag_rs needs slices of whole heads with latent attention, and 9 heads of 128 "
        "over --decode-context-parallel-size 2 are cut inside a head: use a2a or auto."
    )


def test_latents_travel_for_every_head_that_a_piece_touches() -> None:
    sizes = {"num_heads": 9, "head_dim": 128, "dcp_size": 2, "latent_dim": 512}
    # Pieces of 4.5 heads touch 5 each, the middle one twice.
    assert a2a_bytes_per_row(**sizes, dtype_bytes=2) == 5 * (512 * 2 + 4)
    assert ag_rs_bytes_per_row(**sizes) == 9 * 4 + 5 * 512 * 4


def test_workspaces_are_whole_blocks_in_equal_shares() -> None:
    run = chosen(of=model("DeepSeek-R1"), **ranks(8, 8))
    assert run.workspace_tokens == (256 << 20) // (128 * (192 + 128) * 2) // 16 * 16
    assert chosen(of=latent(16), cp_workspace_tokens=100).workspace_tokens == 96
    assert chosen(of=latent(18), cp_workspace_tokens=100, **ranks(3, 3)).workspace_tokens == 96
    assert chosen(of=latent(16), cp_workspace_tokens=100).notes == ()


def test_a_workspace_that_holds_no_block_of_each_rank_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        chosen(of=latent(18), cp_workspace_tokens=40, **ranks(3, 3))
    assert str(caught.value) == (
        "--cp-workspace-tokens 40 is less than whole blocks of --block-size 16 in equal shares of "
        "--decode-context-parallel-size 3 ranks: raise it to at least 48."
    )


@pytest.mark.parametrize(
    ("asked", "note"),
    [
        (
            {"cp_workspace_tokens": 512},
            "--cp-workspace-tokens has no effect: the model caches keys and values as they are, and "
            "every sequence is whole on its rank (--decode-context-parallel-size is 1).",
        ),
        (
            {"enable_expert_parallel": True},
            "--enable-expert-parallel has no effect: the model has no experts.",
        ),
    ],
)
def test_flags_for_other_models(asked: dict[str, Any], note: str) -> None:
    assert chosen(**asked).notes == (note,)


def test_towers_that_are_skipped_are_told() -> None:
    (note,) = chosen(of=model("Kimi-K2.6")).notes
    assert note == "only the text model (language_model.*) is loaded: other towers are skipped."


def test_experts_are_cut_unless_asked_for_whole() -> None:
    assert not chosen(of=model("DeepSeek-R1"), **ranks(8, 8)).expert_parallel
    assert chosen(of=model("DeepSeek-R1"), enable_expert_parallel=True, **ranks(8, 8)).expert_parallel
