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
}
"""Name -> config; together they have each trait of the dense models."""
