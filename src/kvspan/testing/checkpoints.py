"""Small checkpoints for tests, written as Hugging Face writes them. Knows no model's code.

Names and shapes are spelled out here a second time, on purpose: a test that took them from the model
would agree with whatever the model says.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from torch import Tensor

from kvspan.config.mla import MlaConfig
from kvspan.config.model import ModelConfig, parse_model_config


def write_checkpoint(
    directory: Path,
    raw_config: Mapping[str, Any],
    *,
    seed: int,
    shards: int = 1,
    dtype: torch.dtype = torch.float32,
) -> dict[str, Tensor]:
    """Writes a model with random weights: `config.json` and safetensors files.

    Args:
        directory: where to; made if it is not there.
        raw_config: the config, of any architecture that kvspan has.
        seed: fixes the weights.
        shards: 1 writes `model.safetensors`, more write an index with so many files.
        dtype: of the weights.

    Returns:
        What was written, by name.
    """
    directory.mkdir(parents=True, exist_ok=True)
    _write_json(directory / "config.json", raw_config)
    weights = random_weights(raw_config, seed=seed, dtype=dtype)
    if shards == 1:
        save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
        return weights
    weight_map: dict[str, str] = {}
    for i in range(shards):
        file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        part = {name: weights[name] for name in list(weights)[i::shards]}
        save_file(part, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    size = sum(tensor.nbytes for tensor in weights.values())
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    _write_json(directory / "model.safetensors.index.json", index)
    return weights


def spoil_token(directory: Path, token_id: int) -> None:
    """Makes the embedding of a token NaN, and with it whatever a request that has it computes.

    Args:
        directory: of a model in one file, whose output layer is not the embedding.
        token_id: which token.
    """
    path = directory / "model.safetensors"
    weights = load_file(path)
    weights["model.embed_tokens.weight"][token_id] = torch.nan
    save_file(weights, path, metadata={"format": "pt"})


def write_tokenizer(directory: Path, *, vocab_size: int) -> None:
    """Writes a tokenizer whose tokens are single bytes, and a chat template.

    Args:
        directory: of the model.
        vocab_size: tokens; with fewer than 259 some bytes (not those of ASCII) have none.
    """
    special = ["<s>", "<bos>", "</s>"]
    # Space and newline are spelled by letters above ASCII in byte-level BPE.
    letters = sorted(ByteLevel.alphabet(), key=lambda c: (c not in "ĠĊ", c))[: vocab_size - len(special)]
    core = Tokenizer(BPE(vocab={token: i for i, token in enumerate([*special, *letters])}, merges=[]))
    core.pre_tokenizer = ByteLevel(add_prefix_space=False)
    core.decoder = ByteLevelDecoder()
    core.add_special_tokens(special)
    core.save(str(directory / "tokenizer.json"))
    turns = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    template = turns + "{% if add_generation_prompt %}>{% endif %}"
    (directory / "chat_template.jinja").write_text(template, encoding="utf-8")


def random_weights(
    raw_config: Mapping[str, Any], *, seed: int, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """Random weights for a config, lively enough that no two logits are alike.

    Args:
        raw_config: the config, of any architecture that kvspan has.
        seed: fixes the weights.
        dtype: of the weights.

    Returns:
        Name -> tensor: matrices keep the scale of what they multiply, norms are near one and biases
        near zero, but neither is exactly that.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(name: str, shape: tuple[int, ...]) -> Tensor:
        noise = torch.randn(shape, generator=generator)
        if len(shape) == 2:
            return (noise / math.sqrt(shape[1])).to(dtype)
        return (float(name.endswith("norm.weight")) + 0.1 * noise).to(dtype)

    return {name: draw(name, shape) for name, shape in weight_shapes(raw_config).items()}


def weight_shapes(raw_config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor that Hugging Face saves for a config; of its text model, if nested.

    Args:
        raw_config: the config, of any architecture that kvspan has.
    """
    c = parse_model_config(raw_config, where="the test's config")
    vocab = (c.vocab_size, c.hidden_size)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": vocab}
    for i in range(c.num_layers):
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in _layer_shapes(c, i).items()}
    shapes["model.norm.weight"] = (c.hidden_size,)
    if not c.tie_word_embeddings:
        shapes["lm_head.weight"] = vocab
    prefix = "language_model." if "text_config" in raw_config else ""
    return {f"{prefix}{name}": shape for name, shape in shapes.items()}


def _layer_shapes(c: ModelConfig, layer: int) -> dict[str, tuple[int, ...]]:
    size = c.hidden_size
    attention = _grouped_shapes(c) if c.mla is None else _latent_shapes(c, c.mla)
    has_experts = c.moe is not None and layer in c.moe.layers
    mlp = _moe_shapes(c) if has_experts else _gated_shapes("mlp.", size, c.intermediate_size)
    shapes = {
        **{f"self_attn.{name}": shape for name, shape in attention.items() if "weight" in name},
        **mlp,
        "input_layernorm.weight": (size,),
        "post_attention_layernorm.weight": (size,),
        **{f"self_attn.{name}": shape for name, shape in attention.items() if "weight" not in name},
    }
    if c.mlp_bias:
        shapes |= {name.replace("weight", "bias"): shape[:1] for name, shape in mlp.items()}
    return shapes


def _grouped_shapes(c: ModelConfig) -> dict[str, tuple[int, ...]]:
    size, query, kv = c.hidden_size, c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    outputs = {"q_proj": query, "k_proj": kv, "v_proj": kv}
    shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": (n, size) for name, n in outputs.items()}
    shapes["o_proj.weight"] = (size, query)
    if c.architecture.startswith("Qwen2"):  # always has them, and its config does not say so
        shapes |= {f"{name}.bias": (n,) for name, n in outputs.items()}
    elif c.attention_bias:
        shapes |= {f"{name}.bias": (n,) for name, n in {**outputs, "o_proj": size}.items()}
    if c.architecture.startswith("Qwen3"):
        shapes |= {"q_norm.weight": (c.head_dim,), "k_norm.weight": (c.head_dim,)}
    return shapes


def _latent_shapes(c: ModelConfig, mla: MlaConfig) -> dict[str, tuple[int, ...]]:
    size, heads, latent = c.hidden_size, c.num_heads, mla.kv_lora_rank
    query = heads * (mla.nope_dim + mla.rope_dim)
    shapes: dict[str, tuple[int, ...]] = {
        "kv_a_proj_with_mqa.weight": (latent + mla.rope_dim, size),
        "kv_a_layernorm.weight": (latent,),
        "kv_b_proj.weight": (heads * (mla.nope_dim + mla.value_dim), latent),
        "o_proj.weight": (size, heads * mla.value_dim),
    }
    if mla.q_lora_rank is None:
        shapes["q_proj.weight"] = (query, size)
    else:
        shapes["q_a_proj.weight"] = (mla.q_lora_rank, size)
        shapes["q_a_layernorm.weight"] = (mla.q_lora_rank,)
        shapes["q_b_proj.weight"] = (query, mla.q_lora_rank)
    if c.attention_bias:
        biased = ("q_a_proj", "kv_a_proj_with_mqa", "o_proj")
        shapes |= {f"{n}.bias": shapes[f"{n}.weight"][:1] for n in biased if f"{n}.weight" in shapes}
    return shapes


def _moe_shapes(c: ModelConfig) -> dict[str, tuple[int, ...]]:
    size, moe = c.hidden_size, c.moe
    assert moe is not None
    shapes: dict[str, tuple[int, ...]] = {"mlp.gate.weight": (moe.num_experts, size)}
    if moe.correction_bias:
        shapes["mlp.gate.e_score_correction_bias"] = (moe.num_experts,)
    for i in range(moe.num_experts):
        shapes |= _gated_shapes(f"mlp.experts.{i}.", size, moe.intermediate_size)
    if moe.shared_gate:
        shapes |= _gated_shapes("mlp.shared_expert.", size, moe.shared_intermediate_size)
        shapes["mlp.shared_expert_gate.weight"] = (1, size)
    elif moe.shared_intermediate_size:
        shapes |= _gated_shapes("mlp.shared_experts.", size, moe.shared_intermediate_size)
    return shapes


def _gated_shapes(prefix: str, size: int, inner: int) -> dict[str, tuple[int, ...]]:
    shapes = {"gate_proj": (inner, size), "up_proj": (inner, size), "down_proj": (size, inner)}
    return {f"{prefix}{name}.weight": shape for name, shape in shapes.items()}


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1), encoding="utf-8")
