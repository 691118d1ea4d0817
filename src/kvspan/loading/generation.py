"""How a model's authors would have it sampled: `generation_config.json`. Knows names, no tensors.

`do_sample` is not looked at, as in vLLM: a request that says nothing is sampled as the file says.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from kvspan.errors import ConfigError, ModelError, RequestError
from kvspan.loading.hf_files import read_json, read_optional_json
from kvspan.request import SamplingParams

FILE_NAME = "generation_config.json"

_NAMES = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
"""Name in the file -> that of `SamplingParams`."""


def read_generation_config(asked: str, model: Path) -> dict[str, Any]:
    """The file that `--generation-config` asks for; empty if there is none.

    Args:
        asked: `auto` for the model's own, `vllm` for none, or a directory.
        model: what `resolve.locate` found: a Hugging Face directory or a `.gguf` file.

    Raises:
        ConfigError: the directory has no such file.
        ModelError: it cannot be read.
    """
    if asked == "vllm":
        return {}
    if asked == "auto":
        return read_optional_json(model / FILE_NAME) if model.is_dir() else {}
    path = Path(asked).expanduser() / FILE_NAME
    if not path.exists():
        raise ConfigError(
            f"--generation-config {asked} is no directory with a {FILE_NAME}: name one, or say auto for "
            "the model's own, vllm for none."
        )
    return read_json(path)


def sampling_defaults(generation: Mapping[str, Any], *, where: str) -> dict[str, int | float]:
    """Parameters of `SamplingParams` for requests that do not say them.

    Args:
        generation: what the file says.
        where: what it belongs to, for errors.

    Raises:
        ModelError: a value is none that the parameter takes.
    """
    said = {ours: generation[name] for name, ours in _NAMES.items() if generation.get(name) is not None}
    try:
        made = SamplingParams.from_mapping(said)
    except RequestError as error:
        raise ModelError(f"{FILE_NAME} of {where}: {error}") from error
    values = msgspec.structs.asdict(made)
    return {name: values[name] for name in said}
