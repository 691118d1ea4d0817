"""Ranks as processes of one host that talk through memory they share. Knows no model and no executor.

All groups live in one nameless file, each in a region of its own; what happens there is
`csrc/exchange.h`. Sums are made in order of rank and in float32, bit for bit what ranks as threads
compute. A collective begins when it is called and is finished when it is waited for, or when the
group's next one begins: a group has one under way at a time.
"""

import os
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from kvspan.comm.group import Group, Piece
from kvspan.comm.local import solo
from kvspan.comm.pieces import plan_pieces
from kvspan.comm.rendezvous import share_file
from kvspan.comm.sums import sum_in_order
from kvspan.native import extension

T = TypeVar("T")

SLOT_BYTES = 512 << 10
"""What a rank can say in a round; longer messages take several. Two of these a rank fit in its cache."""


def refusal() -> str | None:
    """Why ranks of this machine cannot share memory, as a sentence's end; None = they can."""
    try:
        extension()
    except ImportError as error:
        return f"the native extension cannot be imported ({error})"
    return None


class ShmWorld:
    """All ranks of a replica, each a process of this host; made by `connect`.

    Args:
        rank: of this process.
        size: ranks in all.
        file: a descriptor of the file they share.
        timeout_s: that a collective may take before it raises.
    """

    def __init__(self, rank: int, size: int, *, file: int, timeout_s: float) -> None:
        self.rank = rank
        self.size = size
        self._file = file
        self._timeout_s = timeout_s
        self._used_bytes = 0
        self._made: dict[tuple[tuple[int, ...], ...], Group] = {}

    @classmethod
    def connect(cls, *, rank: int, size: int, store_path: str, timeout_s: float = 600.0) -> "ShmWorld":
        """Meets the other ranks.

        Args:
            rank: of this process.
            size: ranks in all.
            store_path: a path where nothing is yet, the same for all ranks and nobody else's.
            timeout_s: that a collective may take before it raises.

        Raises:
            TimeoutError: not all ranks have come within `timeout_s`.
        """
        file = share_file(rank=rank, size=size, path=Path(store_path), timeout_s=timeout_s)
        return cls(rank, size, file=file, timeout_s=timeout_s)

    def group(self, partition: Sequence[Sequence[int]]) -> Group:
        """This rank's group of `partition`; every rank asks for the same ones in the same order."""
        key = tuple(tuple(members) for members in partition)
        if key not in self._made:
            self._made[key] = self._make(key)
        return self._made[key]

    def close(self) -> None:
        """Lets go of all groups; the other ranks need not do it at the same time."""
        self._made.clear()
        os.close(self._file)

    def _make(self, partition: tuple[tuple[int, ...], ...]) -> Group:
        """Every rank counts the regions of all groups, so that all agree on where each one is."""
        mine: Group = solo()
        for members in partition:
            if len(members) == 1:
                continue
            if self.rank in members:
                mine = self._group(members)
            self._used_bytes += extension().ShmGroup.region_bytes(len(members), SLOT_BYTES)
        return mine

    def _group(self, members: tuple[int, ...]) -> "ShmGroup":
        rank, size = members.index(self.rank), len(members)
        native = extension().ShmGroup(self._file, self._used_bytes, rank, size, SLOT_BYTES, self.size)
        return ShmGroup(native, members, rank, self._timeout_s)


class _UnderWay(Generic[T]):
    """A collective that has begun.

    Args:
        group: whose it is.
        result: makes the result of what has arrived.
        alive: tensors that the collective reads and writes.
    """

    def __init__(self, group: "ShmGroup", result: Callable[[], T], alive: tuple[Tensor, ...]) -> None:
        self._group = group
        self._result = result
        self._alive = alive
        self.arrived = False

    def wait(self) -> T:
        """The result."""
        if not self.arrived:
            self._group.finish()
        return self._result()


class ShmGroup:
    """A group of processes of one host.

    Args:
        native: its side of `csrc/exchange.h`, which need not be there to be imported.
        members: the group's world ranks, in order of their rank here.
        rank: of this process, in the group.
        timeout_s: that a collective may take before it raises.
    """

    def __init__(self, native: Any, members: Sequence[int], rank: int, timeout_s: float) -> None:
        self.rank = rank
        self.size = len(members)
        self._native = native
        self._members = list(members)
        self._timeout_s = timeout_s
        self._share_bytes = native.share_bytes()
        self._summed = _native_dtypes()
        self._last: _UnderWay[Any] | None = None

    def all_reduce(self, x: Tensor) -> _UnderWay[Tensor]:
        """Sums `x` over the ranks, in order of rank. A contiguous `x` is overwritten."""
        x = x.contiguous()
        if x.dtype not in self._summed:
            return self._all_reduce_here(x)
        self._settle()
        self._native.start_all_reduce(self._summed[x.dtype], x.data_ptr(), x.numel(), x.data_ptr())
        return self._began(lambda: x, x)

    def all_gather(self, x: Tensor, sizes: Sequence[int]) -> _UnderWay[Tensor]:
        """Concatenates everybody's [sizes[rank], ...] along dim 0."""
        _check_rows(x, sizes[self.rank])
        x = x.contiguous()
        row_bytes = x.shape[1:].numel() * x.element_size()
        every = x.new_empty(sum(sizes), *x.shape[1:])
        self._settle()
        self._native.start_all_gather(x.data_ptr(), [n * row_bytes for n in sizes], every.data_ptr())
        return self._began(lambda: every, x, every)

    def reduce_scatter(self, x: Tensor, sizes: Sequence[int]) -> _UnderWay[Tensor]:
        """Sums [sum(sizes), ...] over the ranks; each keeps its part of dim 0."""
        _check_rows(x, sum(sizes))
        x = x.contiguous()
        if x.dtype not in self._summed:
            return self._reduce_scatter_here(x, sizes)
        width = x.shape[1:].numel()
        mine = x.new_empty(sizes[self.rank], *x.shape[1:])
        self._settle()
        self._native.start_reduce_scatter(
            self._summed[x.dtype], x.data_ptr(), [n * width for n in sizes], mine.data_ptr()
        )
        return self._began(lambda: mine, x, mine)

    def all_to_all(self, parts: Sequence[Tensor], sizes: Sequence[int]) -> _UnderWay[list[Tensor]]:
        """Gives rank j `parts[j]`; `sizes` are the elements that arrive from each rank."""
        parts = [part.contiguous() for part in parts]
        unit = parts[0].element_size()
        every = parts[0].new_empty(sum(sizes))
        self._settle()
        self._native.start_all_to_all(
            [part.data_ptr() for part in parts],
            [part.numel() * unit for part in parts],
            [n * unit for n in sizes],
            every.data_ptr(),
        )
        return self._began(lambda: list(every.split_with_sizes(list(sizes))), every, *parts)

    def merge_scatter(
        self, out: Tensor, lse: Tensor, pieces: Sequence[Piece]
    ) -> _UnderWay[Tensor] | None:
        """Writes partials where the others read and merge them, each its piece, in one round."""
        num_rows, num_heads, head_dim = out.shape
        plan = plan_pieces(pieces, num_rows, head_dim)
        dtype = self._summed.get(out.dtype)
        if dtype is None or plan.row_bytes(out.itemsize) > self._share_bytes:
            return None
        out, lse = out.contiguous(), lse.contiguous()
        mine = out.new_empty(plan.shapes[self.rank])
        self._settle()
        self._native.start_merge_scatter(
            dtype,
            out.data_ptr(),
            num_heads * head_dim,
            lse.data_ptr(),
            num_heads,
            head_dim,
            plan.numbers,
            mine.data_ptr(),
        )
        return self._began(lambda: mine, out, lse, mine)  # the plan keeps numbers of rows alive

    def finish(self) -> None:
        """Waits for the others and takes what they brought to the collective under way.

        Raises:
            TimeoutError: a rank has not come.
            RuntimeError: a rank came with something else than was agreed.
        """
        self._native.finish(self._timeout_s, self._members)
        assert self._last is not None
        self._last.arrived, self._last = True, None

    def _settle(self) -> None:
        if self._last is not None:
            self.finish()

    def _began(self, result: Callable[[], T], *alive: Tensor) -> _UnderWay[T]:
        self._last = begun = _UnderWay(self, result, alive)
        return begun

    def _all_reduce_here(self, x: Tensor) -> _UnderWay[Tensor]:
        """For what is rarely summed: everything is moved, and torch adds it up."""
        every = x.new_empty(self.size, *x.shape)
        self._settle()
        self._native.start_all_gather(x.data_ptr(), [x.nbytes] * self.size, every.data_ptr())
        return self._began(lambda: sum_in_order(every.unbind()), x, every)

    def _reduce_scatter_here(self, x: Tensor, sizes: Sequence[int]) -> _UnderWay[Tensor]:
        parts = x.split_with_sizes(list(sizes))
        every = x.new_empty(self.size, *parts[self.rank].shape)
        self._settle()
        self._native.start_all_to_all(
            [part.data_ptr() for part in parts],
            [part.nbytes for part in parts],
            [parts[self.rank].nbytes] * self.size,
            every.data_ptr(),
        )
        return self._began(lambda: sum_in_order(every.unbind()), x, every)


def _check_rows(x: Tensor, rows: int) -> None:
    assert x.shape[0] == rows, f"this rank came with {x.shape[0]} rows where {rows} were agreed"


@cache
def _native_dtypes() -> dict[torch.dtype, Any]:
    """What the native exchange adds up."""
    dtypes = extension().Dtype
    return {torch.float32: dtypes.f32, torch.bfloat16: dtypes.bf16, torch.float16: dtypes.f16}
