"""The command line asks what a file and keyword arguments ask, and refuses in the same sentences."""

import argparse
from pathlib import Path
from typing import Any

import pytest

from kvspan.cli.flags import FlagParser, add_engine_flags, engine_config
from kvspan.config.engine import ENGINE_OPTIONS, EngineConfig
from kvspan.config.options import OptionGroup
from kvspan.errors import ConfigError


def parser() -> FlagParser:
    made = FlagParser(prog="kvspan serve")
    add_engine_flags(made, positional_model=True, serves=True)
    return made


def typed(line: str, **defaults: Any) -> EngineConfig:
    return engine_config(parser().parse_args(line.split()), defaults=defaults)


@pytest.mark.parametrize(
    ("line", "values"),
    [
        ("m", {}),
        ("--model m", {}),
        ("m -tp 8 -dcp 4 -pcp 1 -dp 1", {"tensor_parallel_size": 8, "decode_context_parallel_size": 4}),
        ("m --tensor_parallel_size=8", {"tensor_parallel_size": 8}),
        ("m --kv-cache-memory 512MiB", {"kv_cache_memory": 512 << 20}),
        ("m --kv_cache_memory_bytes 4GB", {"kv_cache_memory": 4 * 10**9}),
        ("m --dcp-q-replicate", {"dcp_q_replicate": True}),
        ("m --dcp-q-replicate off --seed 3", {"dcp_q_replicate": "off", "seed": 3}),
        ("m --no-enable-prefix-caching", {"enable_prefix_caching": False}),
        ("m --no_enable_chunked_prefill", {"enable_chunked_prefill": False}),
        ("m --enable-prefix-caching --no-async-scheduling", {}),
        ('m --hf-overrides {"a_b":"c_d"}', {"hf_overrides": {"a_b": "c_d"}}),
        ("m --max-model-len auto --dtype half", {"dtype": "float16"}),
        ("m --tokenizer=--odd_name", {"tokenizer": "--odd_name"}),
    ],
)
def test_a_line_equals_keyword_arguments(line: str, values: dict[str, Any]) -> None:
    assert typed(line) == EngineConfig.from_mapping({"model": "m", **values})


def test_a_typed_flag_wins_over_the_file_and_the_file_over_the_command(tmp_path: Path) -> None:
    file = tmp_path / "engine.yaml"
    file.write_text("model: f\nkv-cache-memory-bytes: 1GiB\nseed: 5\nenable-prefix-caching: false\n")
    config = typed(
        f"--config {file} --kv-cache-memory 2GiB --enable-prefix-caching",
        model="smollm2-135m",
        seed=7,
        block_size=32,
    )
    assert config == EngineConfig.from_mapping(
        {"model": "f", "kv_cache_memory": "2GiB", "seed": 5, "block_size": 32}
    )


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ("m -tp 0", ["--tensor-parallel-size 0"]),
        ("m -tp", ["-tp/--tensor-parallel-size", "expected one argument", "kvspan serve --help"]),
        ("m --tensor-paralel-size 2", ["--tensor-paralel-size", "did you mean --tensor-parallel-size?"]),
        ("m --tensor-parallel 2", ["Unknown option --tensor-parallel", "did you mean"]),
        ("m -t 8", ["-t is not an option of kvspan", "--num-threads"]),  # llama.cpp's
        ("m -p 4", ["Unknown option -p: --help lists"]),
        ("m --enforce_eager", ["--enforce-eager is not an option of kvspan", "leave it out"]),
        ("m --swap-space=4", ["--swap-space is not", "--kv-cache-memory"]),
        ("--swap-space 4", ["--swap-space is not"]),
        ("m --no-enable-lora", ["--no-enable-lora is not", "adapters"]),
        ("m n", ["Unexpected argument n"]),
        ("m --enable-prefix-caching=no", ["--enable-prefix-caching", "ignored explicit argument 'no'"]),
        ("m --async-scheduling", ["--async-scheduling is refused"]),
        ("", ["--model is missing"]),
        ("m --config /nowhere.yaml", ["--config /nowhere.yaml cannot be read"]),
    ],
)
def test_refused(line: str, parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        typed(line)
    assert all(part in str(caught.value) for part in parts), str(caught.value)


def test_an_unknown_key_of_the_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "engine.yaml"
    file.write_text("model: m\nblok_size: 8\n")
    with pytest.raises(ConfigError, match=r"--blok-size: did you mean --block-size\?"):
        typed(f"--config {file}")


def test_commands_refuse_with_their_own_flags() -> None:
    top = FlagParser(prog="kvspan")
    serve = top.add_subparsers(dest="command").add_parser("serve")
    add_engine_flags(serve, positional_model=True)
    found = top.parse_args(["serve", "m", "--tensor_parallel_size", "2"])
    assert engine_config(found).tensor_parallel_size == 2
    with pytest.raises(ConfigError, match="did you mean --block-size"):
        top.parse_args(["serve", "m", "--blok-size", "8"])


def test_after_a_lone_dash_dash_nothing_is_a_flag() -> None:
    made = FlagParser()
    made.add_argument("words", nargs="*")
    assert made.parse_args(["--", "--a_b"]).words == ["--a_b"]


def test_help_has_every_option_under_its_heading_with_its_default() -> None:
    text = " ".join(parser().format_help().split())
    here = {option.group for option in ENGINE_OPTIONS}  # a server has headings of its own
    places = [text.index(f" {group}: ") for group in OptionGroup if group in here]
    assert places == sorted(places)
    for option in ENGINE_OPTIONS:
        assert option.flag in text
        assert f"{option.help} (default: {option.shown_default})" in text
    assert "<" not in text  # no object's repr


def test_commands_without_a_server_tell_of_no_replicas() -> None:
    made = FlagParser(prog="kvspan generate")
    add_engine_flags(made, positional_model=True)
    assert "--data-parallel-size" not in made.format_help()
    assert made.parse_args(["m", "-dp", "2"]).data_parallel_size == "2"  # to be refused by name


def test_commands_may_have_flags_of_their_own() -> None:
    made = parser()
    made.add_argument("--port", type=int)
    assert made.parse_args(["m", "--port", "8"]).port == 8
    assert engine_config(made.parse_args(["m", "--port", "8"])) == EngineConfig(model="m")
    assert isinstance(made, argparse.ArgumentParser)
