from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

from kvspan.loading.safetensors import open_safetensors
from kvspan.testing.checkpoints import random_weights, weight_shapes, write_checkpoint
from kvspan.testing.tiny import TINY

Config = Callable[..., dict[str, Any]]
KINDS = [
    ("LlamaForCausalLM", "llama", {}),
    ("LlamaForCausalLM", "llama", {"attention_bias": True}),
    ("LlamaForCausalLM", "llama", {"mlp_bias": True}),
    ("LlamaForCausalLM", "llama", {"tie_word_embeddings": True}),
    ("Qwen2ForCausalLM", "qwen2", {"head_dim": 16}),
    ("Qwen3ForCausalLM", "qwen3", {}),
    ("Qwen3ForCausalLM", "qwen3", {"attention_bias": True}),
]


@pytest.mark.parametrize(("architecture", "model_type", "changes"), KINDS)
def test_names_and_shapes_are_those_that_transformers_saves(
    config: Config, architecture: str, model_type: str, changes: dict[str, Any]
) -> None:
    raw_config = config(architecture, model_type=model_type, **changes)
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(**raw_config))
    expected = {name: tuple(tensor.shape) for name, tensor in theirs.state_dict().items()}
    if raw_config["tie_word_embeddings"]:
        del expected["lm_head.weight"]
    assert weight_shapes(raw_config) == expected


@pytest.mark.parametrize("name", [n for n, raw in TINY.items() if "moe_intermediate_size" in raw])
def test_names_and_shapes_of_experts_are_those_that_transformers_saves(
    name: str, tmp_path: Path
) -> None:
    """In memory transformers stacks experts; in files each has its own tensors."""
    architecture = getattr(transformers, TINY[name]["architectures"][0])
    architecture(architecture.config_class(**TINY[name])).save_pretrained(tmp_path)
    found = {t.name: t.shape for t in open_safetensors(tmp_path).tensors({})}
    assert weight_shapes(TINY[name]) == found


def test_weights_are_fixed_by_the_seed_and_nothing_is_left_at_a_neutral_value(config: Config) -> None:
    weights = random_weights(config("Qwen3ForCausalLM", attention_bias=True), seed=1)
    again = random_weights(config("Qwen3ForCausalLM", attention_bias=True), seed=1)
    other = random_weights(config("Qwen3ForCausalLM", attention_bias=True), seed=2)
    for name, tensor in weights.items():
        assert torch.equal(tensor, again[name])
        assert not torch.equal(tensor, other[name])
        assert len(tensor.unique()) > 1
        assert tensor.count_nonzero() == tensor.numel()


@pytest.mark.parametrize("shards", [1, 3])
def test_transformers_reads_what_is_written(tmp_path: Path, config: Config, shards: int) -> None:
    written = write_checkpoint(tmp_path, config(model_type="llama"), seed=1, shards=shards)
    assert len(open_safetensors(tmp_path).shards) == shards
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).state_dict()
    assert theirs.keys() == written.keys()
    for name, tensor in written.items():
        assert torch.equal(theirs[name], tensor), name
