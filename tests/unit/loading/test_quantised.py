"""Quantised weights against twins that decode one element at a time, in whole and by any rectangle."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvspan.errors import ModelError
from kvspan.loading.resolve import resolve
from kvspan.loading.safetensors import open_safetensors
from kvspan.testing.checkpoints import write_checkpoint
from kvspan.testing.forward import ForwardCase, forward
from kvspan.testing.tiny import KIMI, tiny_deepseek_v3
from kvspan.topology import Span, Topology

Parts = dict[str, Tensor]
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # output that lies in bits 0..3, 4..7, ... of a word


@dataclass(frozen=True)
class Stored:
    """A weight as some program stores it.

    Args:
        config: its `quantization_config`.
        parts: its tensors.
        element: what the weight at (output, input) is.
    """

    config: dict[str, Any]
    parts: Parts
    shape: tuple[int, int]
    element: Callable[[int, int], float]


def words(nibbles: list[list[int]]) -> Tensor:
    """Rows of values 0..15 as rows of int32, the first value in the lowest bits."""
    rows = []
    for row in nibbles:
        padded = row + [0] * (-len(row) % 8)
        packed = [sum(padded[i + k] << (4 * k) for k in range(8)) for i in range(0, len(padded), 8)]
        rows.append([w - (1 << 32) if w >= 1 << 31 else w for w in packed])
    return torch.tensor(rows, dtype=torch.int32)


def drawn(*shape: int, seed: int = 0) -> list[list[int]]:
    return np.random.default_rng(seed).integers(0, 16, shape).tolist()


def scales(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return (torch.rand(shape, generator=torch.Generator().manual_seed(1)) + 0.5).to(dtype)


def fp8(outputs: int = 300, inputs: int = 130) -> Stored:
    values = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(2))
    weight = values.to(torch.float8_e4m3fn)
    scale = scales(-(-outputs // 128), -(-inputs // 128), dtype=torch.float32)
    return Stored(
        {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
        {"weight": weight, "weight_scale_inv": scale},
        (outputs, inputs),
        lambda o, i: float(weight[o, i]) * float(scale[o // 128, i // 128]),
    )


def compressed_tensors(outputs: int = 20, inputs: int = 100) -> Stored:
    values, scale = drawn(outputs, inputs), scales(outputs, -(-inputs // 32), dtype=torch.bfloat16)
    weights = {"num_bits": 4, "group_size": 32, "symmetric": True, "strategy": "group", "type": "int"}
    return Stored(
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"group_0": {"weights": weights, "targets": ["Linear"]}},
        },
        {
            "weight_packed": words(values),
            "weight_scale": scale,
            "weight_shape": torch.tensor([outputs, inputs]),
        },
        (outputs, inputs),
        lambda o, i: (values[o][i] - 8) * float(scale[o, i // 32]),
    )


def awq(outputs: int = 40, inputs: int = 96) -> Stored:
    values, zeros = drawn(inputs, outputs), drawn(inputs // 32, outputs, seed=1)
    scale = scales(inputs // 32, outputs)

    def packed(rows: list[list[int]]) -> Tensor:
        return words([[row[i + k] for i in range(0, outputs, 8) for k in AWQ_ORDER] for row in rows])

    return Stored(
        {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True},
        {"qweight": packed(values), "qzeros": packed(zeros), "scales": scale},
        (outputs, inputs),
        lambda o, i: (values[i][o] - zeros[i // 32][o]) * float(scale[i // 32, o]),
    )


def gptq(outputs: int = 40, inputs: int = 96, *, shuffled: bool = True, version: int = 1) -> Stored:
    values, zeros = drawn(outputs, inputs), drawn(inputs // 32, outputs, seed=1)
    zeros[0][:3] = [0, 15, 1]
    scale = scales(inputs // 32, outputs)
    group = [i // 32 for i in range(inputs)]
    if shuffled:
        group = np.random.default_rng(3).permutation(group).tolist()
    stored = zeros if version == 2 else [[(z - 1) % 16 for z in row] for row in zeros]
    parts = {"qweight": words(values).t().contiguous(), "qzeros": words(stored), "scales": scale}
    if shuffled:
        parts["g_idx"] = torch.tensor(group, dtype=torch.int32)
    name = {1: "gptq", 2: "gptq_v2"}[version]
    return Stored(
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "checkpoint_format": name},
        parts,
        (outputs, inputs),
        lambda o, i: (values[o][i] - zeros[group[i]][o]) * float(scale[group[i], o]),
    )


STORED = {
    "fp8": fp8(),
    "fp8-exact-blocks": fp8(128, 256),
    "compressed-tensors": compressed_tensors(),
    "awq": awq(),
    "gptq": gptq(),
    "gptq-in-order": gptq(shuffled=False),
    "gptq-second-version": gptq(version=2),
}
RAW = {"architectures": ["LlamaForCausalLM"]}


def write(directory: Path, config: Mapping[str, Any], parts: Parts) -> None:
    (directory / "config.json").write_text(json.dumps({**RAW, "quantization_config": config}))
    save_file(parts, directory / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("name", STORED)
def test_a_weight_and_any_rectangle_of_it(name: str, tmp_path: Path) -> None:
    stored = STORED[name]
    plain = {"norm.weight": torch.rand(5), "head.weight": torch.rand(3, 4), "proj.bias": torch.rand(2)}
    parts = {f"proj.{part}": tensor for part, tensor in stored.parts.items()}
    write(tmp_path, stored.config, parts | plain)
    found = {tensor.name: tensor for tensor in open_safetensors(tmp_path).tensors({})}
    assert found.keys() == {"proj.weight", *plain}
    weight, (outputs, inputs) = found["proj.weight"], stored.shape
    assert weight.shape == stored.shape
    wanted = [[stored.element(o, i) for i in range(inputs)] for o in range(outputs)]
    wanted = torch.tensor(wanted).to(torch.bfloat16)
    whole = weight.read([Span(0, outputs), Span(0, inputs)])
    assert whole.dtype == torch.bfloat16
    assert torch.equal(whole, wanted)
    generator = np.random.default_rng(4)
    for _ in range(60):
        (a, b), (c, d) = (sorted(generator.integers(0, n + 1, 2).tolist()) for n in stored.shape)
        assert torch.equal(weight.read([Span(a, b), Span(c, d)]), wanted[a:b, c:d])


def test_blocks_of_a_real_shape(tmp_path: Path) -> None:
    """DeepSeek-R1's kv_a_proj_with_mqa: [576, 7168] has 5 x 56 scales."""
    weight = torch.ones(576, 7168).to(torch.float8_e4m3fn)
    scale = torch.arange(5 * 56, dtype=torch.float32).view(5, 56)
    write(tmp_path, fp8().config, {"a.weight": weight, "a.weight_scale_inv": scale})
    (tensor,) = open_safetensors(tmp_path).tensors({})
    read = tensor.read([Span(511, 513), Span(127, 129)])
    assert read.tolist() == [[168.0, 169.0], [224.0, 225.0]]
    write(tmp_path, fp8().config, {"a.weight": weight, "a.weight_scale_inv": scale[:4].clone()})
    with pytest.raises(
        ModelError, match=r"has shape \[4, 56\], and a weight of \[576, 7168\] asks for \[5, 56\]"
    ):
        list(open_safetensors(tmp_path).tensors({}))


@pytest.mark.parametrize(
    ("of", "changes", "sentence"),
    [
        ("fp8", {"quant_method": "bitsandbytes"}, 'unknown quant_method "bitsandbytes" .has fp8, '),
        ("fp8", {"quant_method": None}, 'unknown quant_method "without a name"'),
        ("fp8", {"fmt": "e5m2"}, 'unknown fmt "e5m2"'),
        ("fp8", {"weight_block_size": None}, 'the key "weight_block_size" is missing'),
        ("fp8", {"weight_block_size": [128]}, "is not two sizes"),
        ("compressed-tensors", {"format": "float-quantized"}, 'unknown format "float-quantized"'),
        ("compressed-tensors", {"config_groups": {"a": {}, "b": {}}}, "2 config_groups"),
        ("awq", {"bits": 3}, "weights of 3 bits"),
        ("awq", {"version": "gemv"}, 'awq of version "gemv"'),
        ("gptq", {"bits": 8}, "weights of 8 bits"),
        ("gptq", {"checkpoint_format": "marlin"}, 'unknown checkpoint_format "marlin"'),
    ],
)
def test_what_is_not_known_is_refused_by_name(
    of: str, changes: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    write(tmp_path, STORED[of].config | changes, {})
    with pytest.raises(ModelError, match=sentence):
        open_safetensors(tmp_path)


@pytest.mark.parametrize(("of", "part"), [("awq", "scales"), ("compressed-tensors", "weight_scale")])
def test_a_missing_part_is_named(of: str, part: str, tmp_path: Path) -> None:
    parts = {f"proj.{name}": t for name, t in STORED[of].parts.items() if name != part}
    write(tmp_path, STORED[of].config, parts)
    with pytest.raises(ModelError, match=f"is there without proj.{part}"):
        list(open_safetensors(tmp_path).tensors({}))


def test_eight_bits_without_scales_are_refused(tmp_path: Path) -> None:
    write(tmp_path, STORED["fp8"].config, {"proj.weight": STORED["fp8"].parts["weight"]})
    with pytest.raises(ModelError, match=r"proj.weight has dtype F8_E4M3"):
        list(open_safetensors(tmp_path).tensors({}))


def quantise_fp8(weight: Tensor) -> tuple[Parts, Tensor]:
    """A weight in blocks of 16 x 24 that divide nothing, and what is left of it."""
    rows, columns = (torch.arange(n) // b for n, b in zip(weight.shape, (16, 24), strict=True))
    scale = torch.rand(int(rows[-1]) + 1, int(columns[-1]) + 1) * 0.1 + 0.01
    spread = scale[rows][:, columns]
    stored = (weight / spread).to(torch.float8_e4m3fn)
    meant = (stored.float() * spread).to(torch.bfloat16)
    return {"weight": stored, "weight_scale_inv": scale}, meant


def quantise_int4(weight: Tensor) -> tuple[Parts, Tensor]:
    """A weight in groups of 32 inputs as compressed-tensors packs them, and what is left of it."""
    outputs, inputs = weight.shape
    group = torch.arange(inputs) // 32
    scale = (torch.rand(outputs, int(group[-1]) + 1) * 0.1 + 0.01).to(torch.bfloat16)
    spread = scale.float()[:, group]
    values = (weight / spread).round().clamp(-8, 7)
    parts = {
        "weight_packed": words((values.int() + 8).tolist()),
        "weight_scale": scale,
        "weight_shape": torch.tensor([outputs, inputs]),
    }
    return parts, (values * spread).to(torch.bfloat16)


@pytest.mark.parametrize(
    ("raw", "config", "quantise", "chosen"),
    [
        (
            tiny_deepseek_v3(),
            {"quant_method": "fp8", "weight_block_size": [16, 24]},
            quantise_fp8,
            "_proj",
        ),
        (KIMI, compressed_tensors().config, quantise_int4, ".experts."),
    ],
    ids=["deepseek-fp8", "kimi-int4-experts"],
)
def test_a_model_is_what_its_quantised_weights_mean(
    raw: dict[str, Any],
    config: dict[str, Any],
    quantise: Callable[[Tensor], tuple[Parts, Tensor]],
    chosen: str,
    tmp_path: Path,
) -> None:
    """Four ranks cut inside blocks, groups and words."""
    write_checkpoint(tmp_path / "plain", raw, seed=3)
    write_checkpoint(tmp_path / "small", raw, seed=3)
    weights = load_file(tmp_path / "plain" / "model.safetensors")
    meant, stored = dict(weights), dict(weights)
    for name in weights:
        if chosen in name and name.endswith(".weight"):
            parts, meant[name] = quantise(stored.pop(name))
            stored |= {f"{name.removesuffix('weight')}{part}": t for part, t in parts.items()}
    save_file(meant, tmp_path / "plain" / "model.safetensors")
    save_file(stored, tmp_path / "small" / "model.safetensors")
    text = raw.get("text_config", raw) | {"quantization_config": config}
    nested = {**raw, "text_config": text} if "text_config" in raw else text
    (tmp_path / "small" / "config.json").write_text(json.dumps(nested))
    case = ForwardCase(topology=Topology(tp_size=4, dcp_size=4))
    tokens = [list(range(3, 40))]
    wanted = forward(resolve(str(tmp_path / "plain")), tokens, case).logits[0]
    assert torch.equal(forward(resolve(str(tmp_path / "small")), tokens, case).logits[0], wanted)
