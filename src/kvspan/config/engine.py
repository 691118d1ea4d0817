"""What the user asks of an engine. Knows names, defaults and kinds; knows no model and no machine.

Each field is an option: its kind, default, help and heading stand here and nowhere else. "auto" and None
leave the choice to `cost.choose`, which gives a `Resolved`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import yaml

from kvspan.config.options import (
    BYTES,
    FRACTION,
    MAPPING,
    SECONDS,
    SWITCH,
    TEXT,
    TOKENS,
    OptionGroup,
    canonical,
    choice,
    only_off,
    only_one,
    option,
    options_of,
    required,
    whole,
)
from kvspan.errors import ConfigError, reason_of

MAX_RANKS = 1024
"""Ranks of one machine, with room to spare: bounds the search for layouts that fit."""

MAX_THREADS = 1024
"""Threads of a rank, with room to spare: far beyond it OpenMP takes the process down without a word."""

_DTYPES = {
    "bf16": "bfloat16",
    "half": "float16",
    "fp16": "float16",
    "fp32": "float32",
    "float": "float32",
}
_KV_ABSENT = dict.fromkeys(("fp8_e5m2", "fp8_inc"), "floats of 8 bits are e4m3 here; use fp8_e4m3")

_MODEL, _PARALLELISM = OptionGroup.MODEL, OptionGroup.PARALLELISM
_CACHE, _SCHEDULING, _RUNTIME = OptionGroup.CACHE, OptionGroup.SCHEDULING, OptionGroup.RUNTIME


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What was asked. However it is made, every value has been read and checked by its kind.

    Raises:
        ConfigError: a value is not one that its option takes.
    """

    model: str = required(
        TEXT, "a Hugging Face directory, a .gguf file, a built-in name or a hub id (org/name)", _MODEL
    )
    tokenizer: str | None = option(TEXT, None, "where the tokenizer is", _MODEL, unsaid="the model")
    load_format: str = option(
        choice("auto", "safetensors", "gguf", "dummy"),
        "auto",
        "format of the weights; dummy makes random ones",
        _MODEL,
    )
    dtype: str = option(
        choice("auto", "bfloat16", "float16", "float32", aliases=_DTYPES),
        "auto",
        "of weights and activations; auto is the checkpoint's",
        _MODEL,
    )
    max_model_len: int | None = option(
        TOKENS,
        None,
        "tokens of prompt and output together; auto is what the model was made for",
        _MODEL,
    )
    hf_overrides: Mapping[str, Any] = option(
        MAPPING, {}, "keys that replace those of the model's config.json", _MODEL
    )
    generation_config: str = option(
        TEXT,
        "auto",
        "sampling of requests that do not say it: auto is the model's generation_config.json, vllm is "
        "none, a directory is the one in it",
        _MODEL,
    )
    seed: int = option(whole(0, 2**63 - 1), 0, "seed of sampling and of dummy weights", _MODEL)

    tensor_parallel_size: int = option(
        whole(1, MAX_RANKS), 1, "T: ranks that share FFN, embedding and head", _PARALLELISM, short="-tp"
    )
    decode_context_parallel_size: int = option(
        whole(1, MAX_RANKS),
        1,
        "W: ranks over which the KV of each sequence is spread",
        _PARALLELISM,
        short="-dcp",
    )
    prefill_context_parallel_size: int = option(
        whole(1, MAX_RANKS),
        1,
        "P: ranks with the same weights that share out the rows of a step; world = P * T",
        _PARALLELISM,
        short="-pcp",
    )
    data_parallel_size: int = option(
        whole(1, MAX_RANKS),
        1,
        "whole replicas behind one server, each with its own ranks",
        _PARALLELISM,
        short="-dp",
    )
    pipeline_parallel_size: int = option(
        only_one("pipeline parallelism is not there yet; use --tensor-parallel-size"),
        1,
        "stages of layers (only 1 is there yet)",
        _PARALLELISM,
    )
    enable_expert_parallel: bool = option(
        SWITCH,
        False,
        "keep whole experts on each rank, and not a part of each",
        _PARALLELISM,
    )
    dcp_comm_backend: str = option(
        choice("auto", "ag_rs", "a2a"), "auto", "how partial results of attention meet", _PARALLELISM
    )
    dcp_q_replicate: str = option(
        choice("auto", "on", "off", switch_names=("off", "on")),
        "auto",
        "project all queries of a DCP group on each of its ranks, instead of gathering them",
        _PARALLELISM,
    )

    dcp_mode: str = option(
        choice("static", "elastic"),
        "static",
        "whether every request spans its DCP group, or only long ones",
        _PARALLELISM,
    )
    dcp_span_threshold: int | None = option(
        TOKENS,
        None,
        "elastic: tokens from which on a request spans its group",
        _PARALLELISM,
        unsaid="where exchanging costs what a rank saves",
    )
    prefill_strategy: str = option(
        choice("auto", "allgather_q", "allgather_kv"),
        "auto",
        "what travels for a prompt's cached context: queries of new tokens, or keys and values; auto "
        "is what moves less, step by step",
        _PARALLELISM,
    )
    cp_workspace_tokens: int | None = option(
        TOKENS,
        None,
        "cached tokens that a rank gathers, or expands from latents to keys and values, at once",
        _PARALLELISM,
        unsaid="what takes 256 MiB",
    )

    block_size: int = option(
        whole(8, 2**16, multiple_of=8), 16, "B: tokens that a block holds on one rank", _CACHE
    )
    cp_kv_cache_interleave_size: int | None = option(
        whole(1),
        None,
        "I: tokens dealt to a rank at a time, a divisor of B; auto is B",
        _CACHE,
    )
    kv_cache_memory: int | None = option(
        BYTES,
        None,
        "memory of each rank's KV cache, e.g. 512MiB",
        _CACHE,
        unsaid="a fraction of what is free",
        aliases=("kv_cache_memory_bytes",),
    )
    gpu_memory_utilization: float | None = option(
        FRACTION,
        None,
        "fraction of a GPU for weights and KV cache together, or of the host's free memory for the "
        "caches of all ranks",
        _CACHE,
        unsaid="0.9 of a GPU, 0.4 of the host's",
    )
    kv_cache_dtype: str = option(
        choice(
            "auto",
            "bfloat16",
            "float16",
            "float32",
            "fp8_e4m3",
            "int8",
            aliases=_DTYPES | {"fp8": "fp8_e4m3"},
            absent=_KV_ABSENT,
        ),
        "auto",
        "of cached keys and values; auto is --dtype, 8 bits nearly double what the cache holds",
        _CACHE,
    )
    enable_prefix_caching: bool = option(SWITCH, True, "reuse the KV of common prefixes", _CACHE)

    max_logprobs: int = option(
        whole(-1),
        20,
        "log-probabilities that a request may ask for at each position; -1 is no limit",
        _SCHEDULING,
    )
    max_num_batched_tokens: int | None = option(
        TOKENS, None, "tokens of a step at the most", _SCHEDULING
    )
    mixed_chunk_size: int | None = option(
        TOKENS,
        None,
        "tokens of prompts in a step in which others decode, at the most; auto is what a CPU computes "
        "in a second, and no limit on a GPU",
        _SCHEDULING,
    )
    max_num_seqs: int | None = option(
        whole(1), None, "requests that run at once, at the most", _SCHEDULING
    )
    enable_chunked_prefill: bool = option(
        SWITCH, True, "cut prompts so that they fit in steps with others", _SCHEDULING
    )
    async_scheduling: bool = option(
        only_off("scheduling ahead of results is not there yet; leave it out"),
        False,
        "schedule a step while the last one runs (not there yet)",
        _SCHEDULING,
    )

    device: str = option(choice("auto", "cpu", "cuda"), "auto", "what ranks compute on", _RUNTIME)
    comm: str = option(
        choice("auto", "shm", "gloo", "nccl"),
        "auto",
        "transport of the collectives",
        _RUNTIME,
    )
    distributed_executor_backend: str = option(
        choice("auto", "inprocess", "mp", absent={"ray": "Ray is not there yet; use mp"}),
        "auto",
        "ranks as threads of this process, or as processes",
        _RUNTIME,
    )
    num_threads: int | None = option(whole(1, MAX_THREADS), None, "threads of each rank", _RUNTIME)
    step_timeout: float = option(
        SECONDS, 600.0, "seconds after which a rank that does not answer counts as dead", _RUNTIME
    )

    def __post_init__(self) -> None:
        for each in ENGINE_OPTIONS:
            # The one write: a value comes in as the user spelled it and is kept as its kind reads it.
            object.__setattr__(self, each.name, each.read(vars(self)[each.name]))

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Self:
        """What keyword arguments or a file ask.

        Args:
            values: by option, `a_b_c` or `a-b-c`; a value may be written as on the command line.

        Raises:
            ConfigError: an option is unknown, or a value is not one that it takes.
        """
        return cls(**{"model": None, **canonical(values, ENGINE_OPTIONS)})

    def refuse_replicas(self) -> None:
        """Refuses replicas where there is one engine.

        Raises:
            ConfigError: more than one was asked for.
        """
        if self.data_parallel_size > 1:
            raise ConfigError(
                f"--data-parallel-size {self.data_parallel_size}: replicas stand behind a server; use "
                "`kvspan serve` or AsyncLLM, or leave it out."
            )

    @classmethod
    def from_yaml(cls, path: Path) -> Self:
        """What a YAML file of options asks.

        Raises:
            ConfigError: it cannot be read, or asks what cannot be.
        """
        return cls.from_mapping(read_yaml(path))


ENGINE_OPTIONS = options_of(EngineConfig)
"""The table that the fields of `EngineConfig` make."""

OF_SERVERS = ("data_parallel_size",)
"""Options for which one engine alone has no use, and which it refuses."""


def read_yaml(path: Path) -> Mapping[str, Any]:
    """The options of a `--config` file, as they are written there.

    Raises:
        ConfigError: the file is missing, or is no YAML mapping.
    """
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"--config {path} cannot be read: {reason_of(error)}.") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"--config {path} is no mapping of options: write lines like `seed: 1`.")
    return content
