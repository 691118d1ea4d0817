"""Ranks as threads of one process, and the group of one. Knows no processes and no network.

Threads meet on a board: each posts its tensor, all wait, each combines what the others posted, all wait
again before anybody may change what was posted. If one rank fails, the world is aborted and every
other rank's next or present wait raises, so that no thread hangs.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from kvspan.comm.group import Piece
from kvspan.comm.sums import sum_in_order

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Done(Generic[T]):
    """A collective whose result is there already."""

    value: T

    def wait(self) -> T:
        """The result."""
        return self.value


class SoloGroup:
    """A group of one rank: each collective gives back what was put in."""

    rank = 0
    size = 1

    def all_reduce(self, x: Tensor) -> Done[Tensor]:
        """The sum over one rank: `x` of any shape."""
        return Done(x)

    def all_gather(self, x: Tensor, sizes: Sequence[int]) -> Done[Tensor]:
        """[sizes[0], ...] as it came."""
        _check_rows(x, sizes[0])
        return Done(x)

    def reduce_scatter(self, x: Tensor, sizes: Sequence[int]) -> Done[Tensor]:
        """[sizes[0], ...] as it came."""
        _check_rows(x, sizes[0])
        return Done(x)

    def all_to_all(self, parts: Sequence[Tensor], sizes: Sequence[int]) -> Done[list[Tensor]]:
        """The one part, as it came."""
        _check_rows(parts[0], sizes[0])
        return Done(list(parts))

    def merge_scatter(
        self,
        out: Tensor,
        lse: Tensor,  # noqa: ARG002
        pieces: Sequence[Piece],
    ) -> Done[Tensor]:
        """The one piece of `out`, [n, c]: whole as it came, for a row without keys is 0 already."""
        (piece,) = pieces
        return Done(out[piece.rows].flatten(1)[:, piece.columns.start : piece.columns.stop])


def solo() -> SoloGroup:
    """A group of one rank, which costs nothing."""
    return SoloGroup()


class _Board:
    """Where the threads of a group meet."""

    def __init__(self, size: int) -> None:
        self.posted: list[Any] = [None] * size
        self.barrier = threading.Barrier(size)


class LocalGroup:
    """A group of threads.

    Args:
        board: shared by the group's threads.
        rank: this thread's place in the group.
    """

    def __init__(self, board: _Board, rank: int) -> None:
        self._board = board
        self.rank = rank
        self.size = len(board.posted)

    def all_reduce(self, x: Tensor) -> Done[Tensor]:
        """Sums `x` over the ranks, in order of rank and so alike on each."""
        return self._meet(x, sum_in_order)

    def all_gather(self, x: Tensor, sizes: Sequence[int]) -> Done[Tensor]:
        """Concatenates everybody's [sizes[rank], ...] along dim 0."""
        _check_rows(x, sizes[self.rank])
        return self._meet(x, torch.cat)

    def reduce_scatter(self, x: Tensor, sizes: Sequence[int]) -> Done[Tensor]:
        """Sums [sum(sizes), ...] over the ranks; each keeps its part of dim 0."""
        _check_rows(x, sum(sizes))
        start = sum(sizes[: self.rank])
        mine = slice(start, start + sizes[self.rank])
        return self._meet(x, lambda posted: sum_in_order([p[mine] for p in posted]))

    def all_to_all(self, parts: Sequence[Tensor], sizes: Sequence[int]) -> Done[list[Tensor]]:
        """Gives rank j `parts[j]`; `sizes` are the elements that arrive from each rank."""
        done = self._meet(list(parts), lambda posted: [p[self.rank].clone() for p in posted])
        for part, size in zip(done.value, sizes, strict=True):
            _check_rows(part, size)
        return done

    def merge_scatter(self, out: Tensor, lse: Tensor, pieces: Sequence[Piece]) -> None:
        """Threads exchange pieces and merge them themselves."""

    def _meet(self, mine: T, combine: Callable[[list[T]], Any]) -> Done[Any]:
        board = self._board
        board.posted[self.rank] = mine
        board.barrier.wait()
        result = combine(list(board.posted))
        board.barrier.wait()
        return Done(result)


@dataclass
class _Meeting:
    """What the threads of one world share."""

    size: int
    lock: threading.Lock = field(default_factory=threading.Lock)
    boards: dict[tuple[int, tuple[int, ...]], _Board] = field(default_factory=dict)
    aborted: bool = False

    def board(self, key: tuple[int, tuple[int, ...]]) -> _Board:
        with self.lock:
            board = self.boards.setdefault(key, _Board(len(key[1])))
            if self.aborted:
                board.barrier.abort()
            return board

    def abort(self) -> None:
        with self.lock:
            self.aborted = True
            for board in self.boards.values():
                board.barrier.abort()


class LocalWorld:
    """One thread's view of a world of threads; make all of them with `local_worlds`."""

    def __init__(self, meeting: _Meeting, rank: int) -> None:
        self._meeting = meeting
        self._partitions = 0
        self.rank = rank
        self.size = meeting.size

    def group(self, partition: Sequence[Sequence[int]]) -> LocalGroup | SoloGroup:
        """This rank's group of `partition`; every rank asks for the same ones in the same order."""
        self._partitions += 1
        members = next(tuple(group) for group in partition if self.rank in group)
        if len(members) == 1:
            return solo()
        board = self._meeting.board((self._partitions, members))
        return LocalGroup(board, members.index(self.rank))

    def abort(self) -> None:
        """Makes every wait of every rank fail with `threading.BrokenBarrierError`."""
        self._meeting.abort()


def local_worlds(size: int) -> list[LocalWorld]:
    """Worlds for `size` threads that can talk to one another, in order of rank."""
    meeting = _Meeting(size)
    return [LocalWorld(meeting, rank) for rank in range(size)]


def _check_rows(x: Tensor, rows: int) -> None:
    assert x.shape[0] == rows, f"a rank came with {x.shape[0]} rows where {rows} were agreed"
