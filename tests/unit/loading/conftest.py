"""Tiny models, and GGUF files of them, written the way the converter of llama.cpp does."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize

from kvspan.testing.checkpoints import random_weights

GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def tiny_config(architecture: str = "LlamaForCausalLM", **changes: Any) -> dict[str, Any]:
    """A config whose heads are not hidden_size / num_heads wide, so that nothing fits by chance."""
    return {
        "architectures": [architecture],
        "hidden_size": 96,
        "intermediate_size": 160,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": 40,
        "max_position_embeddings": 512,
        "rms_norm_eps": 0.25,
        "rope_theta": 5000.0,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "float32",
    } | changes


@pytest.fixture
def config() -> Callable[..., dict[str, Any]]:
    return tiny_config


@pytest.fixture
def write_gguf(tmp_path: Path) -> Callable[..., tuple[Path, dict[str, torch.Tensor]]]:
    """Writes a GGUF of random weights; returns it and what a reader must find, by HF name."""

    def write(
        arch: str = "llama",
        raw_config: Mapping[str, Any] | None = None,
        kind: GGMLQuantizationType = GGMLQuantizationType.F32,
        metadata: Callable[[GGUFWriter], None] = lambda writer: None,
        divisors: list[float] | None = None,
    ) -> tuple[Path, dict[str, torch.Tensor]]:
        raw_config = raw_config or tiny_config()
        path = tmp_path / f"{arch}-{kind.name}.gguf"
        writer = GGUFWriter(path, arch)
        writer.add_block_count(raw_config["num_hidden_layers"])
        writer.add_context_length(raw_config["max_position_embeddings"])
        writer.add_embedding_length(raw_config["hidden_size"])
        writer.add_feed_forward_length(raw_config["intermediate_size"])
        writer.add_head_count(raw_config["num_attention_heads"])
        writer.add_head_count_kv(raw_config["num_key_value_heads"])
        writer.add_key_length(raw_config["head_dim"])
        writer.add_layer_norm_rms_eps(raw_config["rms_norm_eps"])
        writer.add_rope_freq_base(raw_config["rope_theta"])
        writer.add_bos_token_id(raw_config["bos_token_id"])
        writer.add_eos_token_id(raw_config["eos_token_id"])
        metadata(writer)
        if divisors:
            writer.add_tensor("rope_freqs.weight", np.array(divisors, np.float32))
        expected = {}
        for name, tensor in random_weights(raw_config, seed=3).items():
            stored, expected[name] = _stored(name, tensor, arch, raw_config, kind)
            raw = {} if stored.dtype != np.uint8 else {"raw_dtype": kind}
            writer.add_tensor(_gguf_name(name), stored, **raw)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path, expected

    return write


def _gguf_name(name: str) -> str:
    stem, _, ending = name.rpartition(".")
    if stem in GGUF_NAMES:
        return f"{GGUF_NAMES[stem]}.{ending}"
    _, _, layer, inner = stem.split(".", 3)
    return f"blk.{layer}.{GGUF_NAMES[inner]}.{ending}"


def _stored(
    name: str, tensor: torch.Tensor, arch: str, raw_config: Mapping[str, Any], kind: GGMLQuantizationType
) -> tuple[np.ndarray, torch.Tensor]:
    """What lies in the file, and what a reader must make of it."""
    from gguf.quants import dequantize

    values = tensor.numpy()
    if values.ndim == 2 and kind != GGMLQuantizationType.F32:
        packed = quantize(values, kind)
        seen = torch.from_numpy(dequantize(packed, kind))
        seen = seen.half() if kind == GGMLQuantizationType.F16 else seen.bfloat16()
    else:
        packed, seen = values, tensor
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    key = heads.get(name.split(".")[-2])
    if arch == "llama" and key is not None:
        n = raw_config[key]
        halves = packed.reshape(n, 2, len(packed) // n // 2, *packed.shape[1:])
        packed = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(packed.shape)
    return packed, seen
