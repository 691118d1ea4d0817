"""What the environment may ask for, beside the flags. Nothing else of kvspan reads it."""

import os
from pathlib import Path

from kvspan.errors import ConfigError

CPU_ISA = "KVSPAN_CPU_ISA"
CPU_ISAS = ("portable", "avx2", "avx512")
"""Instruction sets that `KVSPAN_CPU_ISA` may name, slowest first."""


API_KEY = "KVSPAN_API_KEY"
GLIBC_TUNABLES = "GLIBC_TUNABLES"
HUGE_PAGES = "glibc.malloc.hugetlb=1"
"""Has `malloc` ask for huge pages (glibc 2.35 and later; its manual, Memory Allocation Tunables)."""
SPIN_COUNT = "GOMP_SPINCOUNT"
SPINS = 10_000
"""Of a thread that waits for others of its operator, before it sleeps: about 0.2 ms, longer than the gap
between two operators. GNU's runtime has 300,000 unless it is told (libgomp's manual, GOMP_SPINCOUNT)."""


def api_keys() -> tuple[str, ...]:
    """The keys that `KVSPAN_API_KEY` asks a server's clients for, with commas between them."""
    return tuple(key.strip() for key in os.environ.get(API_KEY, "").split(",") if key.strip())


def replica_environment(replica: int, *, num_replicas: int, num_ranks: int) -> dict[str, str]:
    """The environment of a replica's process: with enough GPUs each replica sees its own.

    Args:
        replica: its number.
        num_replicas: of them.
        num_ranks: of each.
    """
    listed = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    devices = sorted(int(path.name[6:]) for path in Path("/dev").glob("nvidia[0-9]*"))
    ids = listed.split(",") if listed else [str(device) for device in devices]
    if num_replicas == 1 or len(ids) < num_replicas * num_ranks:
        return dict(os.environ)
    mine = ids[replica * num_ranks : (replica + 1) * num_ranks]
    return {**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(mine)}


def spin_briefly() -> None:
    """Has threads of this process's operators, and of its children's, make way for other programs soon.

    An operator ends when its last thread does. Where another program has that one's core, the others
    spin for some milliseconds in each of hundreds of operators, and keep it from coming back. It counts
    from when torch is loaded on; what the user has said counts instead.
    """
    if not {SPIN_COUNT, "OMP_WAIT_POLICY"} & os.environ.keys():
        os.environ[SPIN_COUNT] = str(SPINS)


def ranks_environment() -> dict[str, str]:
    """The environment that ranks of one host start in: large blocks of memory come in huge pages.

    A layer's work on a long prompt is tens of MiB, which glibc gives back as soon as they are freed, so
    that the system has to fault in every page of the next layer's: of 4 KiB each, that takes longer than
    writing them. Where glibc or the system does not know the wish, nothing happens; what the user has
    said of it counts.
    """
    said = os.environ.get(GLIBC_TUNABLES, "")
    if HUGE_PAGES.partition("=")[0] in said:
        return dict(os.environ)
    return {**os.environ, GLIBC_TUNABLES: ":".join(filter(None, (said, HUGE_PAGES)))}


def asked_cpu_isa() -> str | None:
    """The instruction set that `KVSPAN_CPU_ISA` forces on the native kernels; None = the best there is.

    Raises:
        ConfigError: it names none that exists.
    """
    asked = os.environ.get(CPU_ISA, "")
    if asked and asked not in CPU_ISAS:
        raise ConfigError(f"{CPU_ISA}={asked} is not one of {', '.join(CPU_ISAS)}.")
    return asked or None
