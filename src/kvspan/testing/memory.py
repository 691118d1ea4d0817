"""Memory of running engines as the kernel counts it. Knows Linux; knows no engine."""

from pathlib import Path

import psutil


def pss_bytes(process: psutil.Process) -> int:
    """Resident bytes of a process, each page divided by the number of processes that share it."""
    lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
    (kib,) = (int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return kib << 10


def tree_pss_bytes() -> int:
    """The same of this process and everything that it started, fork-servers and ranks included."""
    this = psutil.Process()
    return sum(map(pss_bytes, [this, *this.children(recursive=True)]))
