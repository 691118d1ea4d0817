"""The JSON files of a Hugging Face directory. Knows no tensors and no tokenizer."""

import json
from pathlib import Path
from typing import Any

from kvspan.config.model import token_ids
from kvspan.errors import ModelError


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object.

    Raises:
        ModelError: there is no such file, or it holds something else.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(
            f"{path.parent} has no {path.name}: take the file from where the weights come from."
        ) from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read as JSON: {error}.") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} must hold a JSON object, and holds a {type(value).__name__}.")
    return value


def read_optional_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object; a file that is not there is an empty one."""
    return read_json(path) if path.exists() else {}


def read_raw_config(directory: Path) -> dict[str, Any]:
    """Reads `config.json`, its `eos_token_id` completed by those of `generation_config.json`.

    A chat model often ends its turn with a token that only the latter names.

    Args:
        directory: a Hugging Face model's directory.

    Raises:
        ModelError: there is no `config.json`, or it cannot be read.
    """
    raw = read_json(directory / "config.json")
    generation = read_optional_json(directory / "generation_config.json")
    eos = dict.fromkeys(
        (*token_ids(raw.get("eos_token_id")), *token_ids(generation.get("eos_token_id")))
    )
    return raw | ({"eos_token_id": list(eos)} if eos else {})
