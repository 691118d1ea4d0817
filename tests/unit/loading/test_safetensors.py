import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from kvspan.errors import ModelError
from kvspan.loading.safetensors import open_safetensors
from kvspan.testing.checkpoints import write_checkpoint
from kvspan.topology import Span

Config = Callable[..., dict[str, Any]]
FIRST = "model-00001-of-00002.safetensors"
SECOND = "model-00002-of-00002.safetensors"


@pytest.mark.parametrize("shards", [1, 2, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_reads_what_was_written(tmp_path: Path, config: Config, shards: int, dtype: torch.dtype) -> None:
    written = write_checkpoint(tmp_path, config(), seed=1, shards=shards, dtype=dtype)
    checkpoint = open_safetensors(tmp_path)
    found = {t.name: t.read([Span(0, n) for n in t.shape]) for t in checkpoint.tensors({})}
    assert found.keys() == written.keys()
    for name, values in found.items():
        assert values.dtype == dtype
        assert torch.equal(values, written[name]), name


def test_reads_parts_of_rows_and_of_columns_and_empty_ones(tmp_path: Path, config: Config) -> None:
    written = write_checkpoint(tmp_path, config(), seed=1)
    name = "model.layers.1.mlp.down_proj.weight"
    tensor = next(t for t in open_safetensors(tmp_path).tensors({}) if t.name == name)
    assert torch.equal(tensor.read([Span(3, 9), Span(0, 160)]), written[name][3:9])
    assert torch.equal(tensor.read([Span(0, 96), Span(150, 160)]), written[name][:, 150:])
    assert tensor.read([Span(0, 96), Span(5, 5)]).shape == (96, 0)


def test_a_missing_shard_is_named_with_what_it_should_hold(tmp_path: Path, config: Config) -> None:
    weights = write_checkpoint(tmp_path, config(), seed=1, shards=2)
    (tmp_path / SECOND).unlink()
    lost = list(weights)[1::2]
    sentence = (
        rf"{SECOND} is missing; .* holds {len(lost)} tensors \({lost[0]}, {lost[1]}, {lost[2]}, ...\)"
    )
    with pytest.raises(ModelError, match=sentence):
        open_safetensors(tmp_path)


def test_a_tensor_that_is_only_in_the_index_is_named(tmp_path: Path, config: Config) -> None:
    weights = write_checkpoint(tmp_path, config(), seed=1, shards=2)
    part = {name: weights[name] for name in list(weights)[1::2]}
    del part["model.norm.weight"]
    save_file(part, tmp_path / SECOND)
    with pytest.raises(ModelError, match=rf"{SECOND} lacks the tensor model\.norm\.weight"):
        list(open_safetensors(tmp_path).tensors({}))


def test_the_last_byte_cut_off_is_told_in_bytes(tmp_path: Path, config: Config) -> None:
    write_checkpoint(tmp_path, config(), seed=1)
    path = tmp_path / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    sentence = rf"model.safetensors has {len(whole) - 1} bytes, and its header says {len(whole)}"
    with pytest.raises(ModelError, match=sentence):
        list(open_safetensors(tmp_path).tensors({}))


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "cut off: it has 0 bytes"),
        (b"\x05\0\0", "cut off: it has 3 bytes"),
        (b"\xff" * 20, "no safetensors file, or is cut off: it has 20 bytes"),
        (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
        (b"\x02\0\0\0\0\0\0\0[]", "cannot be read"),
        (b"\x08\0\0\0\0\0\0\0not json", "cannot be read"),
    ],
    ids=["empty", "short", "other", "lfs", "list", "no-json"],
)
def test_other_files_are_refused(tmp_path: Path, config: Config, content: bytes, sentence: str) -> None:
    write_checkpoint(tmp_path, config(), seed=1)
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match=sentence):
        list(open_safetensors(tmp_path).tensors({}))


def test_integers_are_refused(tmp_path: Path, config: Config) -> None:
    write_checkpoint(tmp_path, config(), seed=1)
    save_file({"a.qweight": torch.ones(2, dtype=torch.int32)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"a\.qweight has dtype I32"):
        list(open_safetensors(tmp_path).tensors({}))


def test_quantised_checkpoints_are_refused_by_their_config(tmp_path: Path, config: Config) -> None:
    raw_config = config(quantization_config={"quant_method": "hqq", "bits": 4})
    write_checkpoint(tmp_path, raw_config, seed=1)
    with pytest.raises(ModelError, match='unknown quant_method "hqq"'):
        open_safetensors(tmp_path)


@pytest.mark.parametrize("index", ['{"weight_map": 3}', '{"weight_map": {"a": 3}}', "{}", "[]", "{"])
def test_an_index_that_makes_no_sense_is_refused(tmp_path: Path, config: Config, index: str) -> None:
    write_checkpoint(tmp_path, config(), seed=1, shards=2)
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ModelError, match=r"model\.safetensors\.index\.json"):
        open_safetensors(tmp_path)


def test_end_tokens_of_the_generation_config_are_added(tmp_path: Path, config: Config) -> None:
    write_checkpoint(tmp_path, config(eos_token_id=7), seed=1)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 7]}))
    assert open_safetensors(tmp_path).raw_config["eos_token_id"] == [7, 9]
