"""A text model beside other towers, and layers that guess ahead: found, left alone, and nothing else."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from kvspan.errors import ModelError
from kvspan.loading.resolve import resolve
from kvspan.testing.checkpoints import write_checkpoint
from kvspan.testing.forward import ForwardCase, forward
from kvspan.testing.tiny import KIMI, TINY, tiny_deepseek_v3
from kvspan.testing.tolerance import assert_within
from kvspan.topology import Topology

TOKENS = list(range(3, 60))
TOWERS = {
    "vision_tower.patch_embed.proj.weight": torch.ones(2, 3),
    "mm_projector.proj.0.bias": torch.ones(4),
}


def add_tensors(directory: Path, more: dict[str, torch.Tensor]) -> None:
    path = directory / "model.safetensors"
    save_file(load_file(path) | more, path, metadata={"format": "pt"})


@pytest.mark.parametrize("topology", [Topology(), Topology(tp_size=4, dcp_size=4)], ids=str)
def test_a_nested_model_equals_transformers(tmp_path: Path, topology: Topology) -> None:
    weights = write_checkpoint(tmp_path / "nested", KIMI, seed=3)
    add_tensors(tmp_path / "nested", TOWERS)
    text = tmp_path / "text"
    text.mkdir()
    (text / "config.json").write_text(json.dumps(KIMI["text_config"]))
    bare = {name.removeprefix("language_model."): tensor for name, tensor in weights.items()}
    save_file(bare, text / "model.safetensors", metadata={"format": "pt"})
    theirs = transformers.DeepseekV3ForCausalLM.from_pretrained(text, dtype=torch.float32).eval()
    with torch.no_grad():
        wanted = theirs(torch.tensor([TOKENS])).logits[0]
    got = forward(resolve(str(tmp_path / "nested")), [TOKENS], ForwardCase(topology=topology)).logits[0]
    assert_within(got.log_softmax(-1), wanted.log_softmax(-1), "logprobs", torch.float32)


def test_an_unknown_tensor_of_the_text_model_is_still_an_error(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, KIMI, seed=3)
    add_tensors(tmp_path, {"language_model.model.layers.0.surprise.weight": torch.ones(2)})
    with pytest.raises(
        ModelError, match=r"has 1 tensor \(language_model.model.layers.0.surprise.weight\)"
    ):
        forward(resolve(str(tmp_path)), [TOKENS], ForwardCase())


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, TINY["deepseek-v3"], seed=3)
    path = tmp_path / "model.safetensors"
    weights = load_file(path)
    del weights["model.layers.2.mlp.experts.5.up_proj.weight"]
    save_file(weights, path)
    with pytest.raises(
        ModelError, match=r"lacks 1 tensor \(model.layers.2.mlp.experts.5.up_proj.weight\)"
    ):
        forward(resolve(str(tmp_path)), [TOKENS], ForwardCase())


def test_layers_that_guess_ahead_are_left_alone(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "plain", tiny_deepseek_v3(), seed=3)
    wanted = forward(resolve(str(tmp_path / "plain")), [TOKENS], ForwardCase()).logits[0]
    ahead = tmp_path / "ahead"
    write_checkpoint(ahead, tiny_deepseek_v3(), seed=3)
    raw = tiny_deepseek_v3(num_nextn_predict_layers=1)
    (ahead / "config.json").write_text(json.dumps(raw))
    copied = load_file(ahead / "model.safetensors")
    last, after = "model.layers.2.", "model.layers.3."
    more = {after + n.removeprefix(last): t for n, t in copied.items() if n.startswith(last)}
    joints = ("embed_tokens", "enorm", "hnorm", "eh_proj", "shared_head.norm", "shared_head.head")
    add_tensors(ahead, more | {f"{after}{name}.weight": torch.ones(2) for name in joints})
    got = forward(resolve(str(ahead)), [TOKENS], ForwardCase()).logits[0]
    assert torch.equal(got, wanted)
