"""The transports that `--comm` names, and how a rank joins the others over each."""

from typing import Protocol

import torch

from kvspan.comm.dist import DistWorld
from kvspan.comm.group import World
from kvspan.comm.shm import ShmWorld


class JoinedWorld(World, Protocol):
    """A world of processes, which each of them leaves when it ends."""

    def close(self) -> None:
        """Lets go of all groups; the other ranks need not do it at the same time."""
        ...


def join(
    comm: str,
    *,
    rank: int,
    size: int,
    store_path: str,
    timeout_s: float = 600.0,
    device: torch.device | None = None,
) -> JoinedWorld:
    """Meets the other ranks.

    Args:
        comm: `shm`, `gloo` or `nccl`.
        rank: of this process.
        size: ranks in all.
        store_path: a path where nothing is yet, the same for all ranks and nobody else's
            (`executor.children.ForkServer.private_path`); whoever named it removes what is left there.
        timeout_s: that meeting, and later a collective, may take before it raises.
        device: this rank's; NCCL needs it.

    Raises:
        TimeoutError, RuntimeError: not all ranks have come within `timeout_s`.
    """
    if comm == "shm":
        return ShmWorld.connect(rank=rank, size=size, store_path=store_path, timeout_s=timeout_s)
    return DistWorld.connect(
        rank=rank, size=size, store_path=store_path, backend=comm, timeout_s=timeout_s, device=device
    )
