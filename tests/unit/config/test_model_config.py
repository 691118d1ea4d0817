import json
from pathlib import Path
from typing import Any

import pytest

from kvspan.config.model import parse_model_config
from kvspan.config.rope import RopeConfig
from kvspan.errors import ModelError

MODELS = Path(__file__).parents[2] / "data" / "models"
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def facts(name: str) -> dict[str, Any]:
    return json.loads((MODELS / f"{name}.json").read_text())


def rope_of(**settings: Any) -> RopeConfig:
    raw = {k: v for k, v in facts("Llama-3.1-8B").items() if k != "rope_scaling"}
    return parse_model_config(raw | settings, where="config.json").rope


@pytest.mark.parametrize(
    ("name", "architecture", "layers", "heads", "kv_heads", "head_dim", "theta", "tied"),
    [
        ("SmolLM2-135M", "LlamaForCausalLM", 30, 9, 3, 64, 1e5, True),
        ("Llama-3.1-8B", "LlamaForCausalLM", 32, 32, 8, 128, 5e5, False),
        ("Llama-3.1-70B", "LlamaForCausalLM", 80, 64, 8, 128, 5e5, False),
        ("Qwen2.5-72B", "Qwen2ForCausalLM", 80, 64, 8, 128, 1e6, False),  # says no head_dim
    ],
)
def test_bare_facts_are_enough(
    name: str,
    architecture: str,
    layers: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    theta: float,
    tied: bool,
) -> None:
    config = parse_model_config(facts(name), where=name)
    assert (config.architecture, config.num_layers) == (architecture, layers)
    assert (config.heads.num_heads, config.heads.num_kv_heads) == (heads, kv_heads)
    assert (config.head_dim, config.rope.theta, config.tie_word_embeddings) == (head_dim, theta, tied)
    assert config.dtype == "bfloat16"
    assert config.eos_token_ids == ()


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_scaling": {"rope_type": "llama3", **LLAMA3}, "rope_theta": 5e5},
        {"rope_scaling": {"type": "llama3", **LLAMA3}, "rope_theta": 5e5},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}, "rope_theta": 7.0},
    ],
    ids=["rope_type", "type", "rope_parameters"],
)
def test_three_spellings_of_one_thing(spelling: dict[str, Any]) -> None:
    assert rope_of(**spelling) == RopeConfig(
        kind="llama3",
        theta=5e5,
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_positions=8192,
    )


def test_rope_kinds() -> None:
    assert rope_of() == RopeConfig(theta=5e5)
    assert rope_of(rope_scaling=None) == RopeConfig(theta=5e5)
    assert rope_of(rope_parameters={"rope_type": "default", "rope_theta": 3.0}) == RopeConfig(theta=3.0)
    linear = rope_of(rope_scaling={"type": "linear", "factor": 4})
    assert linear == RopeConfig(kind="linear", theta=5e5, factor=4.0)
    yarn = rope_of(rope_scaling={"type": "yarn", "factor": 4, "original_max_position_embeddings": 32768})
    assert (yarn.kind, yarn.factor, yarn.original_max_positions) == ("yarn", 4.0, 32768)
    assert (yarn.beta_fast, yarn.beta_slow, yarn.truncate) == (32.0, 1.0, True)
    assert yarn.amplitude == pytest.approx(1.1386294)  # 0.1 ln 4 + 1
    divided = rope_of(rope_scaling={"rope_type": "divisors", "divisors": [1, 2.5]})
    assert divided == RopeConfig(kind="divisors", theta=5e5, divisors=(1.0, 2.5))


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"rope_type": "longrope", "factor": 4.0}, 'config.json: unknown rope type "longrope"'),
        ({"rope_type": "yarn"}, 'the key "factor" is missing'),
        ({"type": "dynamic", "factor": 4.0}, 'unknown rope type "dynamic"'),
        ({"rope_type": "linear"}, 'rope settings.: the key "factor" is missing'),
        ({"rope_type": "linear", "factor": "4"}, "\"factor\" has the unexpected value '4'"),
        (
            {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0},
            '"high_freq_factor" is missing',
        ),
        ({"rope_type": "divisors"}, 'the key "divisors" is missing'),
    ],
    ids=[
        "longrope",
        "yarn-no-factor",
        "dynamic",
        "no-factor",
        "text-factor",
        "half-llama3",
        "no-divisors",
    ],
)
def test_rope_settings_that_are_refused(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ModelError, match=sentence):
        rope_of(rope_scaling=settings)


@pytest.mark.parametrize("key", ["num_hidden_layers", "hidden_size", "vocab_size", "intermediate_size"])
def test_a_missing_key_is_named(key: str) -> None:
    raw = facts("SmolLM2-135M")
    del raw[key]
    with pytest.raises(ModelError, match=f'config.json: the key "{key}" is missing'):
        parse_model_config(raw, where="config.json")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"architectures": []}, "must name one class"),
        ({"hidden_act": "gelu"}, 'unknown hidden_act "gelu"'),
        ({"num_key_value_heads": 4}, "4 KV heads do not divide 9 attention heads"),
        ({"head_dim": 63}, "head_dim 63 is odd"),
        ({"num_hidden_layers": 0}, '"num_hidden_layers" is 0; it must be at least 1'),
        ({"vocab_size": "many"}, "\"vocab_size\" has the unexpected value 'many'"),
        ({"vocab_size": True}, '"vocab_size" has the unexpected value True'),
        ({"use_sliding_window": True}, "sliding-window"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_cannot_be_is_refused(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ModelError, match=sentence):
        parse_model_config(facts("SmolLM2-135M") | changes, where="config.json")


@pytest.mark.parametrize(("value", "ids"), [(None, ()), (2, (2,)), ([1, 2], (1, 2))])
def test_end_tokens(value: Any, ids: tuple[int, ...]) -> None:
    config = parse_model_config(facts("SmolLM2-135M") | {"eos_token_id": value}, where="test")
    assert config.eos_token_ids == ids
