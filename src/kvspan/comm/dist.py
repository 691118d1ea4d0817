"""Ranks as processes that talk through torch.distributed (gloo or NCCL). Knows no model and no executor.

Whatever only moves is moved as bytes, so every dtype travels (fp8 as well). A reduce-scatter moves
exact parts and sums them here, in order of rank and in float32, which is what ranks as threads compute,
bit for bit. An all-reduce is the backend's own.
"""

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from kvspan.comm.group import Group, Piece
from kvspan.comm.local import solo
from kvspan.comm.sums import sum_in_order

T = TypeVar("T")


class DistWorld:
    """All ranks of a replica, each a process; made by `connect`.

    Args:
        rank: of this process.
        size: ranks in all.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self._made: dict[tuple[tuple[int, ...], ...], Group] = {}

    @classmethod
    def connect(
        cls,
        *,
        rank: int,
        size: int,
        store_path: str,
        backend: str = "gloo",
        timeout_s: float = 600.0,
        device: torch.device | None = None,
    ) -> "DistWorld":
        """Meets the other ranks.

        Args:
            rank: of this process.
            size: ranks in all.
            store_path: a file that does not exist yet, the same for all ranks and nobody else's
                (`executor.children.ForkServer.private_path`); whoever named it removes it.
            backend: "gloo" or "nccl".
            timeout_s: that a collective may take before it raises.
            device: this rank's; NCCL needs it.

        Raises:
            RuntimeError: not all ranks have come within `timeout_s`.
        """
        # The name of this machine need not resolve, and loopback is where its ranks are. Who has set
        # the variable knows better.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
        dist.init_process_group(
            backend,
            init_method=Path(store_path).as_uri(),
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=timeout_s),
            device_id=device if backend == "nccl" else None,
        )
        return cls(rank, size)

    def group(self, partition: Sequence[Sequence[int]]) -> Group:
        """This rank's group of `partition`; every rank asks for the same ones in the same order."""
        key = tuple(tuple(members) for members in partition)
        if key not in self._made:
            self._made[key] = self._make(key)
        return self._made[key]

    def close(self) -> None:
        """Lets go of all groups; the other ranks need not do it at the same time."""
        dist.destroy_process_group()

    def _make(self, partition: tuple[tuple[int, ...], ...]) -> Group:
        # All ranks have to help to make each group, those of other members too.
        made = {
            members: dist.new_group(list(members), sort_ranks=False)
            for members in partition
            if len(members) > 1
        }
        mine = next(members for members in partition if self.rank in members)
        if len(mine) == 1:
            return solo()
        return DistGroup(made[mine], rank=mine.index(self.rank), size=len(mine))


@dataclass(frozen=True, slots=True)
class _UnderWay(Generic[T]):
    """A collective that the backend works on, and what is left to do with what it brings."""

    work: dist.Work
    finish: Callable[[], T]

    def wait(self) -> T:
        """The result."""
        self.work.wait()
        return self.finish()


class DistGroup:
    """A group of processes.

    Args:
        group: of torch.distributed.
        rank: this process's place in it.
        size: its ranks.
    """

    def __init__(self, group: dist.ProcessGroup, *, rank: int, size: int) -> None:
        self._group = group
        self.rank = rank
        self.size = size

    def all_reduce(self, x: Tensor) -> _UnderWay[Tensor]:
        """Sums `x` over the ranks; the bits are the same on each. A contiguous `x` is overwritten."""
        x = x.contiguous()
        return _UnderWay(dist.all_reduce(x, group=self._group, async_op=True), lambda: x)

    def all_gather(self, x: Tensor, sizes: Sequence[int]) -> _UnderWay[Tensor]:
        """Concatenates everybody's [sizes[rank], ...] along dim 0; on the way, all have the largest."""
        _check_rows(x, sizes[self.rank])
        largest = max(sizes)
        padded = _bytes_of(x) if sizes[self.rank] == largest else _padded(x, largest)
        every = torch.empty(self.size * padded.numel(), dtype=torch.uint8, device=x.device)
        work = dist.all_gather(list(every.chunk(self.size)), padded, group=self._group, async_op=True)

        def finish() -> Tensor:
            rows = every.view(x.dtype).view(self.size, largest, *x.shape[1:])
            if min(sizes) == largest:
                return rows.flatten(0, 1)
            return torch.cat([rows[i, :n] for i, n in enumerate(sizes)])

        return _UnderWay(work, finish)

    def reduce_scatter(self, x: Tensor, sizes: Sequence[int]) -> _UnderWay[Tensor]:
        """Sums [sum(sizes), ...] over the ranks; each keeps its part of dim 0."""
        _check_rows(x, sum(sizes))
        row_bytes = x.shape[1:].numel() * x.element_size()
        mine = sizes[self.rank]
        work, parts = self._exchange(
            _bytes_of(x), [n * row_bytes for n in sizes], [mine * row_bytes] * self.size
        )

        def finish() -> Tensor:
            return sum_in_order(parts.view(x.dtype).view(self.size, mine, *x.shape[1:]).unbind())

        return _UnderWay(work, finish)

    def all_to_all(self, parts: Sequence[Tensor], sizes: Sequence[int]) -> _UnderWay[list[Tensor]]:
        """Gives rank j `parts[j]`; `sizes` are the elements that arrive from each rank."""
        dtype, unit = parts[0].dtype, parts[0].element_size()
        work, arrived = self._exchange(
            _bytes_of(torch.cat(list(parts))),
            [p.numel() * unit for p in parts],
            [n * unit for n in sizes],
        )
        return _UnderWay(work, lambda: list(arrived.view(dtype).split_with_sizes(list(sizes))))

    def merge_scatter(self, out: Tensor, lse: Tensor, pieces: Sequence[Piece]) -> None:
        """The backends move tensors and know no attention."""

    def _exchange(
        self, sent: Tensor, sent_bytes: list[int], arriving_bytes: list[int]
    ) -> tuple[dist.Work, Tensor]:
        """An all-to-all of bytes: the first of `sent` to rank 0, and so on."""
        arrived = torch.empty(sum(arriving_bytes), dtype=torch.uint8, device=sent.device)
        work = dist.all_to_all_single(
            arrived, sent, arriving_bytes, sent_bytes, group=self._group, async_op=True
        )
        return work, arrived


def _bytes_of(x: Tensor) -> Tensor:
    """The bytes of `x`, flat: [x.nbytes] uint8."""
    whole = x.contiguous()  # the stride of a dim of one element may be anything even so
    return whole.as_strided((whole.numel(),), (1,)).view(torch.uint8)


def _padded(x: Tensor, rows: int) -> Tensor:
    """The bytes of `x` and after them so many that there are `rows` rows."""
    padded = x.new_empty(rows, *x.shape[1:])
    padded[: x.shape[0]] = x
    return _bytes_of(padded)


def _check_rows(x: Tensor, rows: int) -> None:
    assert x.shape[0] == rows, f"this rank came with {x.shape[0]} rows where {rows} were agreed"
