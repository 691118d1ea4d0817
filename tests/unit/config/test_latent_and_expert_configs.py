"""DeepSeek, Kimi and the Qwen mixtures: bare facts are enough, and what cannot be is one sentence."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvspan.config.mla import MlaConfig
from kvspan.config.model import HeadDims, ModelConfig, parse_model_config, with_overrides
from kvspan.errors import ConfigError, ModelError

MODELS = Path(__file__).parents[2] / "data" / "models"
LATENT = ["DeepSeek-V2-Lite", "DeepSeek-R1", "Kimi-K2.6"]
QWEN2_MOE = {
    "architectures": ["Qwen2MoeForCausalLM"],
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
}


def facts(name: str, **changes: Any) -> dict[str, Any]:
    raw = json.loads((MODELS / f"{name}.json").read_text()) | changes
    return {key: value for key, value in raw.items() if value != "missing"}


def parsed(name: str, **changes: Any) -> ModelConfig:
    return parse_model_config(facts(name, **changes), where="config.json")


@pytest.mark.parametrize("name", LATENT)
def test_latent_attention_stores_one_head(name: str) -> None:
    config = parsed(name)
    assert config.heads.num_kv_heads == config.num_kv_heads == 1
    assert config.head_dims == HeadDims(query=192, rotary=64, key=576, value=512, cached=576, out=128)
    assert config.rope.interleaved
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(config), type=ModelConfig) == config


def test_plain_attention_stores_keys_and_values() -> None:
    dims = parsed("Qwen3-235B-A22B").head_dims
    assert dims == HeadDims(query=128, rotary=128, key=128, value=128, cached=256, out=128)
    assert not parsed("Qwen3-235B-A22B").rope.interleaved


@pytest.mark.parametrize(
    ("name", "scale"),
    [("DeepSeek-R1", 0.1352338), ("DeepSeek-V2-Lite", 0.1147214), ("Kimi-K2.6", 0.1446796)],
)
def test_softmax_scales_of_known_models(name: str, scale: float) -> None:
    config = parsed(name)
    assert config.softmax_scale == pytest.approx(scale, abs=5e-8)
    assert config.rope.amplitude == 1.0  # both mscales are equal


def test_a_query_rank_of_null_is_a_projection_in_one_step() -> None:
    sizes = {"kv_lora_rank": 512, "nope_dim": 128, "rope_dim": 64, "value_dim": 128}
    lite, r1 = parsed("DeepSeek-V2-Lite").mla, parsed("DeepSeek-R1").mla
    assert lite == MlaConfig(q_lora_rank=None, score_factor=lite.score_factor, **sizes)
    assert r1 == MlaConfig(q_lora_rank=1536, score_factor=r1.score_factor, **sizes)


def test_a_nested_text_model_is_found() -> None:
    config = parsed("Kimi-K2.6", eos_token_id=[163586], torch_dtype="float16")
    assert config.tensor_prefix == "language_model."
    assert (config.architecture, config.num_layers) == ("DeepseekV3ForCausalLM", 61)
    assert (config.eos_token_ids, config.dtype) == ((163586,), "float16")
    assert parsed("DeepSeek-R1").tensor_prefix == ""


def test_overrides_reach_a_nested_text_model() -> None:
    raw = with_overrides(facts("Kimi-K2.6"), {"max_position_embeddings": 777})
    assert parse_model_config(raw, where="config.json").max_position_embeddings == 777


def test_how_weights_are_stored_cannot_be_overridden() -> None:
    with pytest.raises(ConfigError, match=r"--hf-overrides has quantization_config.*leave it out"):
        with_overrides(facts("DeepSeek-R1"), {"quantization_config": {"quant_method": "fp8"}})


def test_routing_of_known_models() -> None:
    r1 = parsed("DeepSeek-R1").moe
    assert r1.layers == tuple(range(3, 61))
    assert (r1.num_experts, r1.experts_per_token, r1.intermediate_size) == (256, 8, 2048)
    assert (r1.shared_intermediate_size, r1.shared_gate) == (2048, False)
    assert (r1.num_groups, r1.groups_per_token, r1.group_scores) == (8, 4, 2)
    assert (r1.scoring, r1.correction_bias, r1.normalise, r1.scaling_factor) == (
        "sigmoid",
        True,
        True,
        2.5,
    )
    lite = parsed("DeepSeek-V2-Lite").moe
    assert (lite.layers, lite.shared_intermediate_size) == (tuple(range(1, 27)), 2816)
    assert (lite.scoring, lite.correction_bias, lite.normalise) == ("softmax", False, False)
    qwen = parsed("Qwen3-235B-A22B").moe
    assert (qwen.layers, qwen.num_experts, qwen.shared_intermediate_size) == (tuple(range(94)), 128, 0)
    assert (qwen.scoring, qwen.normalise, qwen.scaling_factor) == ("softmax", True, 1.0)
    shared = parsed("Qwen2.5-72B", **QWEN2_MOE).moe
    assert (shared.shared_intermediate_size, shared.shared_gate) == (5632, True)
    assert parsed("Qwen2.5-72B").moe is None


@pytest.mark.parametrize(
    ("name", "changes", "layers"),
    [
        ("DeepSeek-V2-Lite", {"num_hidden_layers": 8, "moe_layer_freq": 3}, (3, 6)),
        ("Qwen3-235B-A22B", {"num_hidden_layers": 8, "decoder_sparse_step": 2}, (1, 3, 5, 7)),
        ("Qwen3-235B-A22B", {"num_hidden_layers": 4, "mlp_only_layers": [0, 2]}, (1, 3)),
    ],
)
def test_which_layers_have_experts(name: str, changes: dict[str, Any], layers: tuple[int, ...]) -> None:
    assert parsed(name, **changes).moe.layers == layers


def test_a_model_without_a_dense_layer_needs_no_dense_width() -> None:
    assert parsed("Qwen3-235B-A22B", intermediate_size="missing").intermediate_size == 0
    with pytest.raises(ModelError, match='the key "intermediate_size" is missing'):
        parsed("DeepSeek-R1", intermediate_size="missing")


@pytest.mark.parametrize(
    ("name", "changes", "sentence"),
    [
        ("DeepSeek-R1", {"topk_method": "best_of"}, 'unknown topk_method "best_of"'),
        ("DeepSeek-R1", {"scoring_func": "tanh"}, 'unknown scoring_func "tanh"'),
        ("DeepSeek-R1", {"scoring_func": "softmax"}, '"noaux_tc" with scoring_func "softmax"'),
        ("DeepSeek-R1", {"n_group": 7}, "7 groups do not divide 256 experts"),
        ("DeepSeek-R1", {"topk_group": 9}, "9 of 8 groups"),
        ("DeepSeek-R1", {"topk_group": 1, "num_experts_per_tok": 33}, "33 experts, and 32 of 256"),
        ("DeepSeek-V2-Lite", {"norm_topk_prob": True}, "norm_topk_prob is true"),
        ("DeepSeek-V2-Lite", {"kv_lora_rank": 0}, '"kv_lora_rank" is 0'),
        ("DeepSeek-V2-Lite", {"v_head_dim": "missing"}, 'the key "v_head_dim" is missing'),
        ("DeepSeek-V2-Lite", {"qk_rope_head_dim": 63}, "qk_rope_head_dim 63 is odd"),
        ("DeepSeek-V2-Lite", {"rope_scaling": {"type": "su", "factor": 2}}, 'unknown rope type "su"'),
        ("Qwen3-235B-A22B", {"num_experts_per_tok": 129}, "129 experts, and 128 of 128"),
        ("Kimi-K2.6", {"model_type": "llava"}, 'text model of "llava" is nested .*has kimi_k25'),
    ],
)
def test_what_cannot_be_is_refused(name: str, changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ModelError, match=sentence):
        parsed(name, **changes)
