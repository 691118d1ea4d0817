"""Configs of models small enough to run in milliseconds, as Hugging Face writes them.

Sizes are chosen to divide nothing: vocabulary and MLP leave ragged pieces at any number of ranks.
"""

from typing import Any

RawConfig = dict[str, Any]

_BASE: RawConfig = {
    "hidden_size": 360,  # a multiple of every number of heads here, as transformers wants it
    "intermediate_size": 100,
    "num_hidden_layers": 2,
    "vocab_size": 203,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}


def tiny_llama(*, heads: int = 8, kv_heads: int = 2, head_dim: int = 8, **changes: Any) -> RawConfig:
    """A Llama; `changes` are further keys of its config."""
    return {
        **_BASE,
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "attention_bias": False,
        "mlp_bias": False,
        **changes,
    }


def tiny_qwen2(*, heads: int = 6, kv_heads: int = 2, **changes: Any) -> RawConfig:
    """A Qwen2: bias on q, k and v, head_dim from the hidden size."""
    return {
        **_BASE,
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "use_sliding_window": False,
        **changes,
    }


def tiny_qwen3(*, heads: int = 8, kv_heads: int = 4, head_dim: int = 16, **changes: Any) -> RawConfig:
    """A Qwen3: norms over the heads of q and k, a head_dim of its own."""
    return {
        **_BASE,
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "attention_bias": False,
        **changes,
    }


_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

_YARN = {
    "type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 8,
    "beta_slow": 1,
    "mscale": 0.9,
    "mscale_all_dim": 0.7,
}


def tiny_deepseek_v2(*, heads: int = 6, **changes: Any) -> RawConfig:
    """A DeepSeek-V2-Lite: latent attention whose queries are projected in one step, softmax routing."""
    return {
        **_BASE,
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "num_hidden_layers": 3,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "rms_norm_eps": 0.01,  # far from that of the norms over latents
        "q_lora_rank": None,
        "kv_lora_rank": 24,
        "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 8,
        "v_head_dim": 20,
        "attention_bias": False,
        "rope_scaling": _YARN,
        "n_routed_experts": 8,
        "n_shared_experts": 2,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 28,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "topk_method": "greedy",
        "scoring_func": "softmax",
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
        **changes,
    }


def tiny_deepseek_v3(*, heads: int = 6, **changes: Any) -> RawConfig:
    """A DeepSeek-V3: queries through a latent too, sigmoid routing with a bias, within groups."""
    v3 = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "q_lora_rank": 40,
        "n_shared_experts": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 2.5,
        "num_nextn_predict_layers": 0,
    }
    return tiny_deepseek_v2(heads=heads, **v3) | changes


def tiny_kimi(**changes: Any) -> RawConfig:
    """A Kimi K2.6: a DeepSeek-V3 without groups, nested beside a tower that kvspan does not read."""
    text = tiny_deepseek_v3(heads=4, n_group=1, topk_group=1, **changes)
    return {"model_type": "kimi_k25", "text_config": text, "vision_config": {}}


def tiny_qwen3_moe(**changes: Any) -> RawConfig:
    """A Qwen3-MoE, one of its layers dense."""
    return {
        **tiny_qwen3(),
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_hidden_layers": 3,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 28,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [1],
        **changes,
    }


def tiny_qwen2_moe(**changes: Any) -> RawConfig:
    """A Qwen2-MoE: every other layer has experts, and a gated one that all tokens go to."""
    return {
        **tiny_qwen2(),
        "architectures": ["Qwen2MoeForCausalLM"],
        "model_type": "qwen2_moe",
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 28,
        "shared_expert_intermediate_size": 44,
        "norm_topk_prob": False,
        "decoder_sparse_step": 2,
        **changes,
    }


TINY: dict[str, RawConfig] = {
    "llama-gqa": tiny_llama(),
    "llama-gqa-9x3": tiny_llama(heads=9, kv_heads=3),
    "llama-mqa": tiny_llama(heads=6, kv_heads=1, head_dim=12),
    "llama-mha-5-tied": tiny_llama(heads=5, kv_heads=5, tie_word_embeddings=True),
    "llama-biases": tiny_llama(attention_bias=True, mlp_bias=True),
    "llama3-rope": tiny_llama(head_dim=16, rope_scaling=_LLAMA3_ROPE),
    "llama-linear-rope": tiny_llama(rope_scaling={"type": "linear", "factor": 4.0}),
    "qwen2": tiny_qwen2(),
    "qwen2-mqa-tied": tiny_qwen2(kv_heads=1, tie_word_embeddings=True),
    "qwen3": tiny_qwen3(),
    "qwen3-odd-heads-tied": tiny_qwen3(heads=3, kv_heads=1, head_dim=24, tie_word_embeddings=True),
    "llama-yarn": tiny_llama(rope_scaling={"rope_type": "yarn", **_YARN}),
    "qwen2-moe": tiny_qwen2_moe(),
    "qwen3-moe": tiny_qwen3_moe(),
    "qwen3-moe-plain-weights": tiny_qwen3_moe(norm_topk_prob=False, mlp_only_layers=[]),
    "deepseek-v2-lite": tiny_deepseek_v2(),
    "deepseek-v2-groups": tiny_deepseek_v2(
        q_lora_rank=40,
        topk_method="group_limited_greedy",
        n_group=4,
        topk_group=2,
        routed_scaling_factor=16.0,
    ),
    "deepseek-v3": tiny_deepseek_v3(),
    "deepseek-v3-plain-rope": tiny_deepseek_v3(
        rope_scaling=None, norm_topk_prob=False, attention_bias=True, n_group=1, topk_group=1
    ),
}
"""Name -> config; together they have each trait of the models."""

KIMI = tiny_kimi()
"""Nested, so not among those that a class of transformers is made from as they are."""
