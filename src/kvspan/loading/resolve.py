"""From what the user calls a model to its checkpoint. Knows places and formats, no model's code."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvspan.errors import ConfigError, ModelError
from kvspan.loading.dummy import DummyCheckpoint
from kvspan.loading.fetch import PACKAGES, find_packaged
from kvspan.loading.gguf import open_gguf
from kvspan.loading.hf_files import read_raw_config
from kvspan.loading.hub import quiet_hub
from kvspan.loading.lazy import Checkpoint
from kvspan.loading.safetensors import INDEX, SINGLE, open_safetensors

LOAD_FORMATS = ("auto", "safetensors", "gguf", "dummy")

_CONFIG_FILES = ["*.json", "*.jinja", "tiktoken.model"]
_WEIGHT_FILES = ["*.safetensors"]


def resolve(model: str, load_format: str = "auto", *, seed: int = 0) -> Checkpoint:
    """Finds and opens a model's checkpoint.

    Args:
        model: a Hugging Face directory, a `.gguf` file, a built-in name or a hub id.
        load_format: one of `LOAD_FORMATS`; `dummy` takes the config and makes random weights.
        seed: fixes the weights of `dummy`.

    Raises:
        ConfigError: there is no such load format, or the model is not of it.
        ModelError: the model is nowhere, or its files are broken.
    """
    if load_format not in LOAD_FORMATS:
        raise ConfigError(f'Unknown --load-format "{load_format}" (has {", ".join(LOAD_FORMATS)}).')
    path = locate(model, weights=load_format != "dummy")
    if load_format == "dummy":
        return DummyCheckpoint(_raw_config(path), str(path), seed)
    found = "gguf" if path.suffix == ".gguf" else "safetensors"
    if load_format not in ("auto", found):
        raise ConfigError(f"--load-format {load_format}, but {path} is {found}: leave it at auto.")
    return open_gguf(path) if found == "gguf" else open_safetensors(path)


def locate(model: str, *, weights: bool = True) -> Path:
    """Finds where a model lies, and downloads it if it must.

    Args:
        model: a Hugging Face directory, a `.gguf` file, a built-in name or a hub id.
        weights: whether the weights are needed; without them a download is small.

    Returns:
        A directory with a `config.json`, or a `.gguf` file.

    Raises:
        ModelError: it is nowhere.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        return _in_directory(path, weights=weights)
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelError(
                f"{path} is neither a directory nor a .gguf file: a checkpoint's model is the directory "
                "that its config.json is in."
            )
        return path
    if model in PACKAGES:
        if (packaged := find_packaged(model)) is None:
            raise ModelError(f"The built-in model {model} is not installed: run `kvspan fetch {model}`.")
        return packaged
    if re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", model) and path.suffix != ".gguf":
        return _in_directory(_download(model, weights=weights), weights=weights)
    raise ModelError(
        f'No model "{model}": it is no directory, no .gguf file, no built-in model '
        f"({', '.join(PACKAGES)}) and no hub id (org/name)."
    )


def _in_directory(directory: Path, *, weights: bool) -> Path:
    """The directory, or the one GGUF file in it."""
    if any((directory / name).exists() for name in (SINGLE, INDEX)):
        return directory
    ggufs = sorted(directory.glob("*.gguf"))
    if len(ggufs) == 1:
        return ggufs[0]
    if ggufs:
        raise ModelError(f"{directory} has {len(ggufs)} GGUF files; name one, e.g. {ggufs[0]}.")
    if not weights and (directory / "config.json").exists():
        return directory
    others = sorted(p.name for p in directory.iterdir() if p.suffix in (".bin", ".pt", ".pth"))
    hint = f"; {others[0]} is of a format that kvspan does not read" if others else ""
    raise ModelError(
        f"{directory} has no weights: neither {SINGLE}, nor {INDEX}, nor a .gguf file{hint}. "
        "(--load-format dummy needs only config.json.)"
    )


def _download(model: str, *, weights: bool) -> Path:
    """A hub model's files, from the hub's cache on this machine if they are there."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    patterns = _CONFIG_FILES + (_WEIGHT_FILES if weights else [])
    try:
        with quiet_hub():
            return Path(
                snapshot_download(
                    model, allow_patterns=patterns, ignore_patterns=["*/*", "consolidated*"]
                )
            )
    except (OSError, HFValidationError) as error:  # the hub's errors are OSErrors
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(
            f'"{model}" is neither a file or directory here, nor can it be had from the Hugging Face '
            f"hub: {first_line.rstrip('.')}. (Built-in models: {', '.join(PACKAGES)}.)"
        ) from error


def _raw_config(path: Path) -> Mapping[str, Any]:
    return open_gguf(path).raw_config if path.suffix == ".gguf" else read_raw_config(path)
