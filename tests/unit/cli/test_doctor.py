"""`kvspan doctor` says which native path runs and why, in words and as JSON."""

import json

import pytest

from kvspan.attention.backends.cpu import native_path
from kvspan.cli.main import main


def test_doctor_names_the_native_path_and_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    path = native_path()
    assert f"{path.isa}: {path.why}" in capsys.readouterr().out


def test_doctor_as_json_names_a_kernel_for_each_cache(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["attention, bfloat16, latent"].startswith("NativeKernel")
