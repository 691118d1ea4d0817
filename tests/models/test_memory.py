"""Weights are held once: resident memory is them, the KV budget and some libraries."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvspan.loading.fetch import find_packaged

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "memory.py"

pytestmark = [
    pytest.mark.weights,
    pytest.mark.timeout(120),
    pytest.mark.skipif(
        find_packaged("smollm2-135m") is None, reason="`make setup` installs the weights"
    ),
    pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="the kernel does not tell"),
]


@pytest.mark.parametrize(
    "ranks", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(4, marks=pytest.mark.slow)]
)
def test_resident_memory_is_weights_cache_and_350_mb_a_rank(ranks: int) -> None:
    command = [sys.executable, str(SCRIPT), "smollm2-135m", "--ranks", str(ranks)]
    run = subprocess.run([*command, "--kv-bytes", str(256 << 20)], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert found["weights_mb"] >= 250
    assert found["within"], found
