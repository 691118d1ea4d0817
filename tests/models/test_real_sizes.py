"""Real counts of layers and experts on the meta device: every tensor has its place, every byte is known.

Names and shapes are spelled out here from the config's keys, not taken from the model.
"""

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from kvspan.attention.backends.reference import ReferenceKernel
from kvspan.attention.kv_store import CacheFormat
from kvspan.attention.rows import RowGroups
from kvspan.config.model import parse_model_config
from kvspan.cost.memory import kv_bytes_per_token
from kvspan.layers.linear import Storage
from kvspan.models.base import Model, RankContext
from kvspan.models.registry import build_model
from kvspan.topology import Topology

MODELS = Path(__file__).parents[1] / "data" / "models"
NAMES = ["DeepSeek-R1", "Kimi-K2.6", "Qwen3-235B-A22B", "DeepSeek-V2-Lite", "Llama-3.1-70B"]
BLOCK, BLOCKS = 16, 3
META = torch.device("meta")

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Place:
    """A place in a group: all that building a model asks of one."""

    rank: int
    size: int


def facts(name: str) -> dict[str, Any]:
    return json.loads((MODELS / f"{name}.json").read_text())


def built(
    name: str,
    topology: Topology,
    rank: int,
    *,
    expert_parallel: bool = False,
    kv_dtype: torch.dtype = torch.bfloat16,
) -> Model:
    config = parse_model_config(facts(name), where=name)
    context = RankContext(
        topology=topology,
        rank=rank,
        tp=Place(topology.tp_rank(rank), topology.tp_size),
        dcp=Place(topology.dcp_rank(rank), topology.dcp_size),
        row_groups=RowGroups(
            pcp=Place(0, 1),
            columns=Place(topology.dcp_rank(rank), topology.dcp_size),
            home=Place(topology.dcp_rank(rank), topology.dcp_size),
            vocabulary=Place(topology.tp_rank(rank), topology.tp_size),
        ),
        exchange="a2a",
        replicate_q=False,
        expert_parallel=expert_parallel,
        kernel=ReferenceKernel(),
        storage=Storage(torch.bfloat16, META),
        cache=CacheFormat(block_size=BLOCK, dtype=kv_dtype, computed=torch.bfloat16, device=META),
        workspace_tokens=BLOCK,
        together_tokens=BLOCK,
    )
    return build_model(config, context)


def expected(name: str) -> Shapes:
    raw = facts(name)
    c = raw.get("text_config", raw)
    prefix = "language_model." if c is not raw else ""
    vocab = (c["vocab_size"], c["hidden_size"])
    shapes: Shapes = {
        "model.embed_tokens.weight": vocab,
        "model.norm.weight": (c["hidden_size"],),
        "lm_head.weight": vocab,
    }
    for i in range(c["num_hidden_layers"]):
        shapes |= {f"model.layers.{i}.{key}": shape for key, shape in layer(c, i).items()}
    return {prefix + key: shape for key, shape in shapes.items()}


def layer(c: dict[str, Any], i: int) -> Shapes:
    size = c["hidden_size"]
    shapes: Shapes = {"input_layernorm.weight": (size,), "post_attention_layernorm.weight": (size,)}
    shapes |= latent(c) if "kv_lora_rank" in c else grouped(c)
    experts = c.get("n_routed_experts", c.get("num_experts", 0))
    if not experts or i < c.get("first_k_dense_replace", 0):
        return shapes | mlp("mlp.", size, c["intermediate_size"])
    inner = c["moe_intermediate_size"]
    shapes["mlp.gate.weight"] = (experts, size)
    for e in range(experts):
        shapes |= mlp(f"mlp.experts.{e}.", size, inner)
    if "n_shared_experts" in c:
        shapes |= mlp("mlp.shared_experts.", size, inner * c["n_shared_experts"])
    if c.get("topk_method") == "noaux_tc":
        shapes["mlp.gate.e_score_correction_bias"] = (experts,)
    return shapes


def mlp(prefix: str, size: int, inner: int) -> Shapes:
    return {
        f"{prefix}gate_proj.weight": (inner, size),
        f"{prefix}up_proj.weight": (inner, size),
        f"{prefix}down_proj.weight": (size, inner),
    }


def grouped(c: dict[str, Any]) -> Shapes:
    size, heads, kv = c["hidden_size"], c["num_attention_heads"], c["num_key_value_heads"]
    dim = c.get("head_dim", size // heads)
    shapes: Shapes = {
        "self_attn.q_proj.weight": (heads * dim, size),
        "self_attn.k_proj.weight": (kv * dim, size),
        "self_attn.v_proj.weight": (kv * dim, size),
        "self_attn.o_proj.weight": (size, heads * dim),
    }
    if c["model_type"].startswith("qwen3"):
        shapes |= {"self_attn.q_norm.weight": (dim,), "self_attn.k_norm.weight": (dim,)}
    return shapes


def latent(c: dict[str, Any]) -> Shapes:
    size, heads, rank = c["hidden_size"], c["num_attention_heads"], c["kv_lora_rank"]
    query = heads * (c["qk_nope_head_dim"] + c["qk_rope_head_dim"])
    shapes: Shapes = {
        "self_attn.kv_a_proj_with_mqa.weight": (rank + c["qk_rope_head_dim"], size),
        "self_attn.kv_a_layernorm.weight": (rank,),
        "self_attn.kv_b_proj.weight": (heads * (c["qk_nope_head_dim"] + c["v_head_dim"]), rank),
        "self_attn.o_proj.weight": (size, heads * c["v_head_dim"]),
    }
    if (query_rank := c["q_lora_rank"]) is None:
        return shapes | {"self_attn.q_proj.weight": (query, size)}
    return shapes | {
        "self_attn.q_a_proj.weight": (query_rank, size),
        "self_attn.q_a_layernorm.weight": (query_rank,),
        "self_attn.q_b_proj.weight": (query, query_rank),
    }


@pytest.mark.parametrize("expert_parallel", [False, True], ids=["cut", "whole"])
@pytest.mark.parametrize("dcp_size", [1, 8])
@pytest.mark.parametrize("name", NAMES)
def test_every_tensor_has_its_place_on_eight_ranks(
    name: str, dcp_size: int, expert_parallel: bool
) -> None:
    wanted, topology = expected(name), Topology(tp_size=8, dcp_size=dcp_size)
    for rank in (0, 7):
        model = built(name, topology, rank, expert_parallel=expert_parallel)
        targets = model.weight_targets()
        assert {key: target.shape for key, target in targets.items()} == wanted
        filled: Counter[str] = Counter()
        for target in targets.values():
            if target.parameter is not None:
                filled[target.parameter] += torch.Size(target.taken_shape).numel()
        assert filled == {key: p.numel() for key, p in model.parameters_by_name().items()}


def test_ranks_together_keep_every_expert_once() -> None:
    topology, kept = Topology(tp_size=8, dcp_size=8), Counter[str]()
    for rank in range(8):
        targets = built("DeepSeek-V2-Lite", topology, rank, expert_parallel=True).weight_targets()
        kept.update(key for key, t in targets.items() if ".experts." in key and t.parameter is not None)
    assert set(kept.values()) == {1}
    assert len(kept) == 26 * 64 * 3


@pytest.mark.parametrize(
    ("name", "tp_size", "dcp_size", "num_bytes"),
    [
        ("DeepSeek-V2-Lite", 1, 1, 31104),
        ("Kimi-K2.6", 1, 1, 70272),
        ("Qwen3-235B-A22B", 1, 1, 192512),
        ("Qwen2.5-72B", 1, 1, 327680),
        ("Llama-3.1-70B", 1, 1, 327680),
        ("Llama-3.1-8B", 1, 1, 131072),
        ("SmolLM2-135M", 1, 1, 23040),
        ("DeepSeek-R1", 8, 1, 70272),
        ("DeepSeek-R1", 8, 8, 8784),
        ("Qwen3-235B-A22B", 8, 1, 48128),
        ("Qwen3-235B-A22B", 8, 2, 24064),
    ],
)
def test_cached_bytes_of_allocated_tensors(
    name: str, tp_size: int, dcp_size: int, num_bytes: int
) -> None:
    stores = built(name, Topology(tp_size=tp_size, dcp_size=dcp_size), 0).kv_stores()
    for store in stores:
        store.allocate(BLOCKS)
    total = sum(tensor.nbytes for store in stores for tensor in store.tensors)
    assert total == num_bytes * BLOCKS * BLOCK * dcp_size
    assert sum(store.bytes_per_token for store in stores) == num_bytes * dcp_size


def test_deepseek_r1_at_65536_tokens() -> None:
    config = parse_model_config(facts("DeepSeek-R1"), where="DeepSeek-R1")
    cached = 65_536 * kv_bytes_per_token(config, kv_dtype_bytes=2)
    assert f"{cached / 2**30:.2f} GiB" == "4.29 GiB"


@pytest.mark.parametrize("kv_dtype", [torch.float8_e4m3fn, torch.int8], ids=str)
@pytest.mark.parametrize(
    ("name", "num_bytes"),
    [
        ("DeepSeek-R1", 61 * (512 + 2 + 64 + 2)),
        ("Qwen3-235B-A22B", 94 * 4 * 2 * (128 + 2)),
        ("Llama-3.1-8B", 32 * 8 * 2 * (128 + 2)),
    ],
)
def test_eight_bits_take_half_the_bytes_and_their_scales(
    name: str, num_bytes: int, kv_dtype: torch.dtype
) -> None:
    stores = built(name, Topology(), 0, kv_dtype=kv_dtype).kv_stores()
    for store in stores:
        store.allocate(BLOCKS)
    total = sum(tensor.nbytes for store in stores for tensor in store.tensors)
    assert total == num_bytes * BLOCKS * BLOCK
    config = parse_model_config(facts(name), where=name)
    assert kv_bytes_per_token(config, kv_dtype_bytes=1) == num_bytes
    assert num_bytes < 0.51 * kv_bytes_per_token(config, kv_dtype_bytes=2)
