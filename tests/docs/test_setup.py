"""`make setup` tells what it does before it does it: a newcomer waits for minutes."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.docs.pages import ROOT

PYTHON = """#!/bin/sh
[ "$1" = --version ] && echo Python 3.11.0
[ "$2" = venv ] || exit 0
mkdir -p "$3/bin"
for tool in pip kvspan; do
    printf '#!/bin/sh\\necho %s "$@"\\n' $tool > "$3/bin/$tool"
    chmod +x "$3/bin/$tool"
done
"""
"""Stands for Python, and makes environments whose tools say what they are asked."""


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
def test_each_stage_is_told_before_it_begins(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)
    outside = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    told = subprocess.run(
        ["make", "setup", f"PYTHON={python}", f"VENV={tmp_path}/venv", "TORCH=torch==9", "TORCH_INDEX="],
        cwd=ROOT,
        env={**outside, "CXX": "true"},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout.splitlines()
    assert told[0].startswith("Setting up")
    assert "minutes" in told[0]
    stages = [(i, line) for i, line in enumerate(told) if line.startswith("[")]
    assert [line[:5] for _, line in stages] == ["[1/4]", "[2/4]", "[3/4]", "[4/4]"]
    behind = [told[i + 1] for i, _ in stages[1:]]
    assert behind == [
        "pip install --disable-pip-version-check --quiet torch==9",  # in a log; a terminal has bars
        "pip install --disable-pip-version-check --quiet --editable .[dev]",
        "kvspan fetch smollm2-135m",
    ]
