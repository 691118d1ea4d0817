"""What ranks find in their environment."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from kvspan.config.environment import GLIBC_TUNABLES, HUGE_PAGES, ranks_environment, spin_briefly

FAULTS = """
import resource, torch
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
torch.empty(96 << 20, dtype=torch.uint8).fill_(1)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
ENABLED = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def can_wish() -> bool:
    """Whether the C library and the system know the wish, and do not grant it unasked."""
    library, version = platform.libc_ver()
    knows = library == "glibc" and tuple(map(int, version.split("."))) >= (2, 35)
    return knows and ENABLED.exists() and "[madvise]" in ENABLED.read_text()


def test_threads_spin_briefly_unless_the_user_has_said_how(monkeypatch: pytest.MonkeyPatch) -> None:
    for said in ({}, {"GOMP_SPINCOUNT": "7"}, {"OMP_WAIT_POLICY": "ACTIVE"}):
        for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
            monkeypatch.delenv(name, raising=False)
        for name, value in said.items():
            monkeypatch.setenv(name, value)
        spin_briefly()
        kept = {name: os.environ.get(name) for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
        wanted = said or {"GOMP_SPINCOUNT": "10000"}
        assert {name: value for name, value in kept.items() if value} == wanted


@pytest.mark.skipif(not can_wish(), reason="no huge pages on request here")
def test_large_blocks_come_in_huge_pages() -> None:
    def faults(environment: dict[str, str]) -> int:
        ran = subprocess.run(
            [sys.executable, "-c", FAULTS],
            env=environment,
            check=True,
            capture_output=True,
            text=True,
            timeout=120,
        )
        return int(ran.stdout)

    assert 5 * faults(ranks_environment()) < faults(dict(os.environ))


def test_what_the_user_has_said_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(GLIBC_TUNABLES, raising=False)
    assert ranks_environment()[GLIBC_TUNABLES] == HUGE_PAGES
    monkeypatch.setenv(GLIBC_TUNABLES, "glibc.malloc.arena_max=2")
    assert ranks_environment()[GLIBC_TUNABLES] == f"glibc.malloc.arena_max=2:{HUGE_PAGES}"
    monkeypatch.setenv(GLIBC_TUNABLES, "glibc.malloc.hugetlb=0")
    assert ranks_environment()[GLIBC_TUNABLES] == "glibc.malloc.hugetlb=0"
