"""A model that nobody here can build is refused by its name, whatever else its config lacks."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvspan.config.engine import EngineConfig
from kvspan.engine.build import resolve_engine
from kvspan.errors import ModelError


@pytest.mark.parametrize(
    ("raw", "sentence"),
    [
        (
            {"architectures": ["MambaForCausalLM"], "model_type": "mamba", "state_size": 16},
            "unknown architecture MambaForCausalLM .has LlamaForCausalLM, .*DeepseekV3ForCausalLM",
        ),
        (
            {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": {"hidden_size": 8}},
            "unknown architecture Gemma3ForConditionalGeneration .has LlamaForCausalLM",
        ),
        (
            {"model_type": "kimi_k25", "text_config": {"architectures": ["Mamba2ForCausalLM"]}},
            "unknown architecture Mamba2ForCausalLM",
        ),
        ({"model_type": "mamba2"}, r"must name one class, got \[\] .has LlamaForCausalLM"),
    ],
    ids=["mamba", "nested", "inside-kimi", "nameless"],
)
def test_an_architecture_that_is_not_there(raw: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(raw))
    asked = EngineConfig.from_mapping({"model": str(tmp_path), "load_format": "dummy"})
    with pytest.raises(ModelError, match=sentence):
        resolve_engine(asked)
