"""From what the user calls a model to its config: kvspan's facts, files, the hub. Reads no weights."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from kvspan.config.model import ModelConfig, parse_model_config, text_config
from kvspan.cost.facts import DATA
from kvspan.errors import ModelError
from kvspan.loading.hf_files import read_json
from kvspan.loading.hub import quiet_hub

MODELS = DATA / "models"
ORGANISATIONS = {"DeepSeek": "deepseek-ai", "Kimi": "moonshotai", "Llama": "meta-llama", "Qwen": "Qwen"}
"""By the first word of a model of the facts, whose it is on the hub; others come as packages."""


@dataclass(frozen=True, slots=True)
class FoundModel:
    """A model as far as arithmetic needs it.

    Args:
        name: as it was called, or as the facts spell it.
        served: as `kvspan serve` takes it.
        raw: the config of its text model.
        config: the same, read.
    """

    name: str
    served: str
    raw: Mapping[str, Any]
    config: ModelConfig


def find_model(name: str) -> FoundModel:
    """Finds a model's config; only keys that the arithmetic needs must be in it.

    Args:
        name: a model that kvspan has facts of, in any case, with or without its organisation; a
            directory with a `config.json` or one `.gguf` file; a file of either kind; or a hub id.

    Raises:
        ModelError: it is nowhere, or lacks a key, which the sentence names.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        return _read(name, name, _config_in(path))
    if path.is_file():
        return _read(path.stem, name if path.suffix == ".gguf" else str(path.parent), path)
    known = {_normal(file.stem): file for file in sorted(MODELS.glob("*.json"))}
    if (file := known.get(_normal(name))) is not None:
        return _read(file.stem, served_name(file.stem), file)
    if re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", name):
        return _read(name, name, _downloaded(name))
    near = get_close_matches(_normal(name), known, n=3, cutoff=0.4) or list(known)
    raise ModelError(
        f'No model "{name}": it is no directory with a config.json, no config or .gguf file and no hub '
        "id (org/name); "
        f"of models that kvspan has facts of, the nearest are {', '.join(known[n].stem for n in near)}."
    )


def served_name(name: str) -> str:
    """A model of the facts as the hub has it, or under the name of its package."""
    family = next((family for family in ORGANISATIONS if name.startswith(family)), None)
    return name.lower() if family is None else f"{ORGANISATIONS[family]}/{name}"


def _normal(name: str) -> str:
    """`moonshotai/Kimi-K2.6` -> `kimik26`."""
    return re.sub(r"[^a-z0-9]", "", name.rpartition("/")[2].lower())


def _config_in(directory: Path) -> Path:
    """The config, or the one file that says it among its metadata."""
    ggufs, config = sorted(directory.glob("*.gguf")), directory / "config.json"
    return ggufs[0] if len(ggufs) == 1 and not config.exists() else config


def _read(name: str, served: str, path: Path) -> FoundModel:
    raw = _read_gguf(path) if path.suffix == ".gguf" else read_json(path)
    if not raw.get("architectures") and "text_config" not in raw:
        raw = {**raw, "architectures": ["unknown"]}  # arithmetic goes by sizes
    where = str(path)
    return FoundModel(name, served, text_config(raw, where=where), parse_model_config(raw, where=where))


def _read_gguf(path: Path) -> dict[str, Any]:
    """The metadata as a config; weights count as bfloat16, which is what they are computed in."""
    from kvspan.loading.gguf_config import translate_config  # and with it a tokenizer's library
    from kvspan.loading.gguf_file import read_gguf

    return translate_config(read_gguf(path))


def _downloaded(name: str) -> Path:
    """The config of a hub model, from the hub's cache on this machine if it is there."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HFValidationError

    try:
        with quiet_hub():
            return Path(hf_hub_download(name, "config.json"))
    except (OSError, HFValidationError) as error:  # the hub's errors are OSErrors
        lines = str(error).strip().splitlines() or [type(error).__name__]
        have = ", ".join(file.stem for file in sorted(MODELS.glob("*.json")))
        raise ModelError(
            f'The config of "{name}" cannot be had from the Hugging Face hub: {lines[0]} '
            f"(kvspan has facts of {have}; a config.json may be named as a file.)"
        ) from error
