"""Pieces of a step's attention output as native code takes them. Knows no ranks and no shared memory."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from torch import Tensor

from kvspan.comm.group import Piece

_LSE_BYTES = 4


@dataclass(frozen=True, slots=True)
class PiecePlan:
    """What does not change from layer to layer and step to step while pieces are the same.

    Args:
        alive: what `numbers` has addresses of.
        numbers: five of each piece, as `pieces_of` of the native module reads them.
        shapes: of each piece, rows and columns.
        most_columns, most_heads: of the widest row that a rank is sent.
    """

    alive: list[Tensor | slice]
    numbers: list[int]
    shapes: list[tuple[int, int]]
    most_columns: int
    most_heads: int

    @property
    def sizes(self) -> list[int]:
        """Elements of each piece."""
        return [num_rows * num_columns for num_rows, num_columns in self.shapes]

    def row_bytes(self, itemsize: int) -> int:
        """Bytes of the widest row, its LSEs included, rounded up to whole floats."""
        return self.most_columns * itemsize + (self.most_heads + 1) * _LSE_BYTES


def plan_pieces(pieces: Sequence[Piece], num_rows: int, head_dim: int) -> PiecePlan:
    """The plan of some pieces, which is remembered with the addresses in it.

    Args:
        pieces: what each rank owns, in order of rank.
        num_rows: of the step's attention output.
        head_dim: of its heads.
    """
    return _plan(tuple(pieces), num_rows, head_dim)


@lru_cache(maxsize=1024)
def _plan(pieces: tuple[Piece, ...], num_rows: int, head_dim: int) -> PiecePlan:
    chosen = [p.rows if isinstance(p.rows, slice) else p.rows.contiguous() for p in pieces]
    rows = [_row_numbers(each, num_rows) for each in chosen]
    columns = [(piece.columns.start, piece.columns.size) for piece in pieces]
    return PiecePlan(
        alive=chosen,
        numbers=[n for its_rows, its in zip(rows, columns, strict=True) for n in (*its_rows, *its)],
        shapes=[(count, size) for (_, _, count), (_, size) in zip(rows, columns, strict=True)],
        most_columns=max(size for _, size in columns),
        most_heads=max(piece.heads(head_dim).size for piece in pieces),
    )


def _row_numbers(rows: slice | Tensor, num_rows: int) -> tuple[int, int, int]:
    """The address of row numbers or 0 for consecutive ones, the first row, how many."""
    if isinstance(rows, Tensor):
        return rows.data_ptr(), 0, len(rows)
    first, stop, step = rows.indices(num_rows)
    assert step == 1, "a slice of rows has no gaps"
    return 0, first, max(stop - first, 0)
