"""What work costs a rank, and what it costs to share it out: a few rates, measured or assumed."""

from dataclasses import dataclass
from typing import Self

from kvspan.cost.facts import Device
from kvspan.topology import Topology

EXCHANGE_S = {"shm": 12e-6, "gloo": 1e-3, "nccl": 20e-6}
"""Seconds of merging 16 KiB of partials at 2 ranks: the first two as measured (docs/results/cpu.md); for
NCCL on NVLink about what `data/hardware.json` has for small collectives."""
MULTIPLIED_FLOPS = {"cpu": 170e9, "cuda": 690e12}
"""Of bf16 in a second: one core of docs/results/cpu.md, 0.7 of an H100's data sheet."""
BANDWIDTH_BYTES_S = {"cpu": 24e9, "cuda": 3.35e12}
"""Bytes a rank reads in a second: one core of docs/results/cpu.md, an H100 by its data sheet."""
SHARED_BANDWIDTH_BYTES_S = {"cpu": 15.6e9, "cuda": 3.35e12}
"""The same while the others read as well: both cores of docs/results/cpu.md take 31.2 GB/s."""
GATHERED_BYTES_S = {"shm": 4e9, "gloo": 0.5e9, "nccl": 300e9}
"""Bytes of others that a rank gathers in a second, at 2 ranks and 32 MB: the first two as measured on
the machine of docs/results/cpu.md, into memory that is there (shm: 0.8e9 while small pages are faulted
in); for NCCL on NVLink about what `data/hardware.json` has."""
_LARGE = 1 << 28
"""Bytes of a gather of which latency is no part."""


@dataclass(frozen=True, slots=True)
class Pace:
    """What work and its sharing cost a rank.

    Args:
        flops: of bf16 in a second.
        read_bytes_s: of weights that it reads in a second while the others do.
        gather_s: seconds of a gather of nearly nothing over PCP coordinates.
        bytes_s: of others that it gathers in a second.
    """

    flops: float
    read_bytes_s: float
    gather_s: float
    bytes_s: float

    @classmethod
    def of_device(cls, device: Device, topology: Topology, *, played: bool = False) -> Self:
        """By facts of the machine.

        Args:
            device: of each rank.
            topology: a legal layout.
            played: how steps run (`cost.played`).
        """
        p = topology.pcp_size
        rates = device.rates_of(topology.world_size, played=played)
        least, large = (device.collective_s("ag", n, num_ranks=p, played=played) for n in (1, _LARGE))
        return cls(
            rates.gemm_tflops["bf16"] * 1e12,
            rates.weights_gbs * 1e9,
            least,
            _LARGE * (1 - 1 / p) / max(large - least, 1e-9),
        )

    @classmethod
    def assumed(cls, device: str, comm: str) -> Self:
        """Where no facts are known.

        Args:
            device: `cpu` or `cuda`.
            comm: transport of collectives.
        """
        return cls(
            MULTIPLIED_FLOPS[device],
            SHARED_BANDWIDTH_BYTES_S[device],
            EXCHANGE_S[comm],
            GATHERED_BYTES_S[comm],
        )
