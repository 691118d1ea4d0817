"""What can be asked: one table, read alike however it is said, every refusal once."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest

from kvspan.config.absent import INSTEAD, SHORT
from kvspan.config.engine import ENGINE_OPTIONS, EngineConfig, read_yaml
from kvspan.config.server import SERVER_OPTIONS
from kvspan.errors import ConfigError


def asked(**values: Any) -> EngineConfig:
    return EngineConfig.from_mapping({"model": "m", **values})


def refusal(**values: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        asked(**values)
    return str(caught.value)


def test_defaults() -> None:
    config = asked()
    assert (config.block_size, config.seed, config.step_timeout) == (16, 0, 600.0)
    assert config.enable_prefix_caching is config.enable_chunked_prefill is True
    assert config.async_scheduling is config.enable_expert_parallel is False
    assert config.max_model_len is config.kv_cache_memory is config.gpu_memory_utilization is None
    assert config.dtype == config.kv_cache_dtype == config.comm == config.device == "auto"
    assert config.hf_overrides == {}


@pytest.mark.parametrize(
    ("name", "given", "kept"),
    [
        ("model", Path("/a/b"), "/a/b"),
        ("tensor_parallel_size", "8", 8),
        ("pipeline_parallel_size", 1, 1),
        ("block_size", "64", 64),
        ("cp_kv_cache_interleave_size", "auto", None),
        ("cp_kv_cache_interleave_size", 4, 4),
        ("dcp_q_replicate", True, "on"),
        ("dcp_q_replicate", False, "off"),
        ("dcp_q_replicate", "auto", "auto"),
        ("kv_cache_memory", "512MiB", 512 << 20),
        ("kv_cache_memory_bytes", "4GB", 4 * 10**9),
        ("kv-cache-memory", 1000, 1000),
        ("gpu_memory_utilization", "1", 1.0),
        ("kv_cache_dtype", "bf16", "bfloat16"),
        ("kv_cache_dtype", "fp16", "float16"),
        ("dtype", "half", "float16"),
        ("dtype", "float", "float32"),
        ("dtype", "fp32", "float32"),
        ("max_model_len", "32K", 32768),
        ("max_model_len", "32k", 32000),
        ("max_model_len", "auto", None),
        ("hf_overrides", '{"rope_theta": 5}', {"rope_theta": 5}),
        ("hf_overrides", {"rope_theta": 5}, {"rope_theta": 5}),
        ("enable_prefix_caching", False, False),
        ("step_timeout", "0.5", 0.5),
        ("seed", None, 0),
    ],
)
def test_values(name: str, given: Any, kept: object) -> None:
    config = EngineConfig.from_mapping({"model": "m"} | {name: given})
    field = {"kv_cache_memory_bytes": "kv_cache_memory"}.get(name, name.replace("-", "_"))
    assert dataclasses.asdict(config)[field] == kept
    assert type(dataclasses.asdict(config)[field]) is type(kept)


@pytest.mark.parametrize(
    ("values", "parts"),
    [
        ({"model": None}, ["--model", "missing", ".gguf", "hub id"]),
        ({"model": ""}, ["--model ''", "name or a path"]),
        ({"tensor_parallel_size": 0}, ["--tensor-parallel-size 0", "from 1 to 1024"]),
        ({"tensor_parallel_size": True}, ["--tensor-parallel-size"]),
        ({"tensor_parallel_size": 2.0}, ["--tensor-parallel-size 2.0"]),
        ({"tensor_parallel_size": "two"}, ["--tensor-parallel-size two", "whole number"]),
        ({"decode_context_parallel_size": 10**9}, ["--decode-context-parallel-size 1000000000", "1024"]),
        ({"prefill_context_parallel_size": 0}, ["0 is not", "from 1 to 1024"]),
        ({"pipeline_parallel_size": 3}, ["--pipeline-parallel-size 3", "--tensor-parallel-size"]),
        ({"block_size": 12}, ["--block-size 12", "multiple of 8"]),
        ({"block_size": 0}, ["--block-size 0", "from 8"]),
        ({"cp_kv_cache_interleave_size": 0}, ["--cp-kv-cache-interleave-size 0", "at least 1"]),
        ({"dcp_comm_backend": "nccl"}, ["--dcp-comm-backend nccl", "auto, ag_rs, a2a"]),
        ({"dcp_q_replicate": "yes"}, ["--dcp-q-replicate yes", "auto, on, off"]),
        ({"dcp_q_replicate": 1}, ["--dcp-q-replicate 1", "auto, on, off"]),
        ({"comm": "mpi"}, ["--comm mpi", "auto, shm, gloo, nccl"]),
        ({"kv_cache_memory": "4XB"}, ["--kv-cache-memory 4XB", "512MiB"]),
        ({"kv_cache_memory": 0}, ["--kv-cache-memory 0", "512MiB"]),
        ({"gpu_memory_utilization": 1.1}, ["--gpu-memory-utilization 1.1", "0.9"]),
        ({"gpu_memory_utilization": 0}, ["--gpu-memory-utilization 0", "over 0"]),
        ({"gpu_memory_utilization": math.nan}, ["--gpu-memory-utilization nan"]),
        ({"kv_cache_dtype": "fp8_e5m2"}, ["--kv-cache-dtype fp8_e5m2 is refused", "fp8_e4m3"]),
        ({"dtype": "int4"}, ["--dtype int4", "bfloat16, float16, float32", "bf16"]),
        ({"max_model_len": -1}, ["--max-model-len -1", "32k"]),
        ({"max_model_len": "0.3K"}, ["--max-model-len 0.3K", "32k"]),
        ({"max_num_seqs": 0}, ["--max-num-seqs 0", "at least 1"]),
        ({"async_scheduling": True}, ["--async-scheduling is refused", "leave it out"]),
        ({"enable_prefix_caching": "no"}, ["--enable-prefix-caching no", "true nor false"]),
        ({"seed": -1}, ["--seed -1", "from 0"]),
        ({"hf_overrides": "{"}, ["--hf-overrides {", "JSON"]),
        ({"hf_overrides": "[1]"}, ["--hf-overrides [1]", "JSON object"]),
        ({"load_format": "pt"}, ["--load-format pt", "safetensors, gguf, dummy"]),
        ({"step_timeout": math.inf}, ["--step-timeout inf", "seconds over 0"]),
        ({"distributed_executor_backend": "ray"}, ["ray is refused", "mp"]),
        ({"num_threads": 0}, ["--num-threads 0", "1 to 1024"]),
        ({"tensor_paralel_size": 2}, ["--tensor-paralel-size", "did you mean --tensor-parallel-size?"]),
        ({"colour": "red"}, ["Unknown option --colour", "--help"]),
        ({"kv_cache_memory": 1, "kv-cache-memory": 1}, ["--kv-cache-memory", "twice"]),
        ({"kv_cache_memory": 1, "kv_cache_memory_bytes": 1}, ["--kv-cache-memory", "twice"]),
        ({"swap_space": 4}, ["--swap-space is not an option of kvspan", "--kv-cache-memory"]),
        ({"rope_scaling": {}}, ["--rope-scaling", "--hf-overrides"]),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else "",
)
def test_refused(values: dict[str, Any], parts: list[str]) -> None:
    sentence = refusal(**values)
    assert all(part in sentence for part in parts), sentence
    assert "\n" not in sentence
    assert len(sentence) < 250


def test_what_others_know_is_refused_by_name_and_is_not_there() -> None:
    known = {option.flag for option in (*ENGINE_OPTIONS, *SERVER_OPTIONS)}
    assert not known & set(INSTEAD)
    assert not {option.short for option in ENGINE_OPTIONS} & set(SHORT)
    for flag, instead in INSTEAD.items():
        sentence = refusal(**{flag.removeprefix("--").replace("-", "_"): 1})
        assert sentence == f"{flag} is not an option of kvspan: {instead}."


def test_flags_named_as_the_way_out_are_there() -> None:
    known = {option.flag for option in (*ENGINE_OPTIONS, *SERVER_OPTIONS)}
    named = {word.strip(",.:;") for text in INSTEAD.values() for word in text.split()}
    assert {word.replace("--no-", "--") for word in named if word.startswith("--")} <= known


def test_however_it_is_made_it_is_checked() -> None:
    assert EngineConfig(model="m", dtype="bf16") == asked(dtype="bfloat16")
    with pytest.raises(ConfigError, match="--block-size 12"):
        EngineConfig(model="m", block_size=12)


def test_reading_what_was_read_changes_nothing() -> None:
    config = asked(kv_cache_memory="1GiB", max_model_len="32k", dcp_q_replicate=True, dtype="half")
    assert EngineConfig.from_mapping(dataclasses.asdict(config)) == config


def test_nobody_writes_to_it() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        asked().seed = 1  # type: ignore[misc]


def test_yaml_equals_keyword_arguments(tmp_path: Path) -> None:
    file = tmp_path / "engine.yaml"
    file.write_text(
        "model: m\ntensor-parallel-size: 4\ndecode_context_parallel_size: 2\nmax-model-len: 32k\n"
        "dcp_q_replicate: off\nenable-prefix-caching: false\nkv_cache_memory_bytes: 512MiB\n"
        "hf_overrides: {rope_theta: 5.0}\ntokenizer:\n"
    )
    assert EngineConfig.from_yaml(file) == asked(
        tensor_parallel_size=4,
        decode_context_parallel_size=2,
        max_model_len=32000,
        dcp_q_replicate=False,
        enable_prefix_caching=False,
        kv_cache_memory=512 << 20,
        hf_overrides={"rope_theta": 5.0},
    )


def test_an_empty_yaml_asks_nothing(tmp_path: Path) -> None:
    file = tmp_path / "empty.yaml"
    file.write_text("# nothing\n")
    assert read_yaml(file) == {}


@pytest.mark.parametrize(
    ("content", "part"),
    [(b"- a\n", "no mapping"), (b"a: [1\n", "line 2"), (b"\xff\xfe\xfa", "cannot be read")],
)
def test_yaml_that_is_none(tmp_path: Path, content: bytes, part: str) -> None:
    file = tmp_path / "broken.yaml"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=part) as caught:
        EngineConfig.from_yaml(file)
    assert str(file) in str(caught.value)


def test_yaml_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--config .*none\.yaml cannot be read"):
        EngineConfig.from_yaml(tmp_path / "none.yaml")
