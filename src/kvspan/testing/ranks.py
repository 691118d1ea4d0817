"""Ranks as threads, for tests: run a body on each, and count what they said to each other."""

import contextlib
import os
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

from torch import Tensor

from kvspan.comm.group import Group, Pending, Piece, World
from kvspan.comm.local import LocalWorld, local_worlds
from kvspan.comm.shm import ShmWorld

T = TypeVar("T")


def run_ranks(size: int, body: Callable[[LocalWorld], T], *, timeout_s: float = 60.0) -> list[T]:
    """Runs `body` on `size` ranks, each a thread with its own world.

    Args:
        size: ranks.
        body: what each rank does with its world.
        timeout_s: the time guard: ranks that still wait for one another then have their waits broken.

    Returns:
        What each rank returned, in order of rank.

    Raises:
        BaseException: the first failure of a rank that was not merely caused by another's.
    """
    worlds = local_worlds(size)

    def guarded(world: LocalWorld) -> T:
        try:
            return body(world)
        except BaseException:
            world.abort()
            raise

    guard = threading.Timer(timeout_s, worlds[0].abort)
    guard.start()
    try:
        with ThreadPoolExecutor(size) as pool:
            futures = [pool.submit(guarded, world) for world in worlds]
    finally:
        guard.cancel()
    failures = [f.exception() for f in futures if f.exception() is not None]
    for failure in sorted(failures, key=lambda e: isinstance(e, threading.BrokenBarrierError)):
        assert failure is not None
        raise failure
    return [f.result() for f in futures]


@contextlib.contextmanager
def shared_worlds(size: int, *, timeout_s: float = 30.0) -> Iterator[list[ShmWorld]]:
    """Worlds over shared memory for `size` threads, in order of rank.

    Args:
        size: ranks.
        timeout_s: that a collective may take before it raises.
    """
    with tempfile.TemporaryFile() as file:
        worlds = [
            ShmWorld(rank, size, file=os.dup(file.fileno()), timeout_s=timeout_s) for rank in range(size)
        ]
        yield worlds
        for world in worlds:
            world.close()


@dataclass(frozen=True, slots=True)
class Call:
    """One collective as a rank made it."""

    op: str
    elements: int


@dataclass
class CountingGroup:
    """A group that notes each call and hands it on."""

    inner: Group
    calls: list[Call] = field(default_factory=list)

    @property
    def rank(self) -> int:
        """Place in the group."""
        return self.inner.rank

    @property
    def size(self) -> int:
        """Ranks in the group."""
        return self.inner.size

    def all_reduce(self, x: Tensor) -> Pending[Tensor]:
        """Notes and sums."""
        self.calls.append(Call("all_reduce", x.numel()))
        return self.inner.all_reduce(x)

    def all_gather(self, x: Tensor, sizes: Sequence[int]) -> Pending[Tensor]:
        """Notes and gathers."""
        self.calls.append(Call("all_gather", x.numel()))
        return self.inner.all_gather(x, sizes)

    def reduce_scatter(self, x: Tensor, sizes: Sequence[int]) -> Pending[Tensor]:
        """Notes, sums and scatters."""
        self.calls.append(Call("reduce_scatter", x.numel()))
        return self.inner.reduce_scatter(x, sizes)

    def all_to_all(self, parts: Sequence[Tensor], sizes: Sequence[int]) -> Pending[list[Tensor]]:
        """Notes and sends."""
        self.calls.append(Call("all_to_all", sum(p.numel() for p in parts)))
        return self.inner.all_to_all(parts, sizes)

    def merge_scatter(self, out: Tensor, lse: Tensor, pieces: Sequence[Piece]) -> Pending[Tensor] | None:
        """Merges and, if the group can do it, notes."""
        merged = self.inner.merge_scatter(out, lse, pieces)
        if merged is not None:
            self.calls.append(Call("merge_scatter", out.numel()))
        return merged


@dataclass
class CountingWorld:
    """A world whose groups count; `groups` holds them in the order they were made."""

    inner: World
    groups: list[CountingGroup] = field(default_factory=list)

    @property
    def rank(self) -> int:
        """Place in the world."""
        return self.inner.rank

    @property
    def size(self) -> int:
        """Ranks in all."""
        return self.inner.size

    def group(self, partition: Sequence[Sequence[int]]) -> CountingGroup:
        """A counting group of the partition."""
        group = CountingGroup(self.inner.group(partition))
        self.groups.append(group)
        return group
