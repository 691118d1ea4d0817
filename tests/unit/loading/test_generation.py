"""Sampling as a model's authors would have it: which file, which keys, which refusals."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvspan.errors import ConfigError, ModelError
from kvspan.loading.generation import read_generation_config, sampling_defaults

FILE = "generation_config.json"


def test_the_file_that_is_asked_for(tmp_path: Path) -> None:
    model, other = tmp_path / "model", tmp_path / "other"
    for directory, temperature in ((model, 0.6), (other, 0.7)):
        directory.mkdir()
        (directory / FILE).write_text(json.dumps({"temperature": temperature}))
    assert read_generation_config("auto", model) == {"temperature": 0.6}
    assert read_generation_config("vllm", model) == {}
    assert read_generation_config(str(other), model) == {"temperature": 0.7}
    assert read_generation_config("auto", tmp_path) == {}, "there is none"
    assert read_generation_config("auto", model / "model.gguf") == {}
    with pytest.raises(
        ConfigError, match=r"--generation-config .*is no directory with a generation_config"
    ):
        read_generation_config(str(tmp_path), model)


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text("[1]")
    with pytest.raises(ModelError, match=FILE):
        read_generation_config("auto", tmp_path)


@pytest.mark.parametrize(
    ("said", "defaults"),
    [
        ({}, {}),
        (  # Qwen3's, with keys that are of no interest here
            {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": [1]},
            {"temperature": 0.6, "top_p": 0.95, "top_k": 20},
        ),
        ({"temperature": None, "repetition_penalty": 1.05}, {"repetition_penalty": 1.05}),
        ({"max_new_tokens": 2048, "min_p": 0.05}, {"min_p": 0.05, "max_tokens": 2048}),
    ],
)
def test_what_requests_get(said: dict[str, Any], defaults: dict[str, Any]) -> None:
    assert sampling_defaults(said, where="m") == defaults


def test_a_value_that_cannot_be_is_named_with_its_model() -> None:
    with pytest.raises(ModelError, match=r"^generation_config.json of m: top_p must be .*got 1.5"):
        sampling_defaults({"top_p": 1.5}, where="m")
