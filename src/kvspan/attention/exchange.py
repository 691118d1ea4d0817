"""How the partial results of a DCP group meet. Knows pieces; has no modes.

Every rank of the group owns a **piece** of the step's attention output: some rows times a slice of the
flattened head-by-dim axis. Each rank has partials of all rows over its own keys, and ends with its own
piece over all keys. Which pieces there are is data, the same on all ranks; a piece may begin inside a
head, and may be empty.

    a2a     each rank sends everybody's piece of its partials with their LSE; the receiver merges
    ag_rs   LSEs are gathered, each rank rescales its partials to the whole softmax, the sum is scattered
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvspan.attention.merge import shard_weights, weighted_sum
from kvspan.attention.shares import rounded, share_of
from kvspan.comm.group import Group, Pending, Piece
from kvspan.comm.pieces import plan_pieces
from kvspan.topology import Span

LSE_BYTES = 4


class Exchange(Protocol):
    """One way to bring partial results together."""

    def start(self, out: Tensor, lse: Tensor, pieces: Sequence[Piece]) -> Pending[Tensor]:
        """Begins the exchange; work can be put between it and `wait()`.

        Args:
            out: [R, H, D], this rank's partials over its own keys.
            lse: [R, H] float32, natural log; not finite = no key seen here.
            pieces: what each rank of the group owns, in order of `dcp_rank`.

        Returns:
            A pending [n, c] in `out.dtype`: this rank's piece of attention over all keys.
        """
        ...


@dataclass(frozen=True, slots=True)
class _Then:
    """A pending value with work to do on it when it is there."""

    pending: Pending[list[Tensor]] | Pending[Tensor]
    finish: Callable[..., Tensor]

    def wait(self) -> Tensor:
        return self.finish(self.pending.wait())


class AllToAll:
    """Sends pieces of partials with their LSE, and merges at the receiver in float32.

    A group that merges by itself is left to it; it then sends the same pieces and makes the same sums.

    Args:
        group: the DCP group.
    """

    def __init__(self, group: Group) -> None:
        self._group = group

    def start(self, out: Tensor, lse: Tensor, pieces: Sequence[Piece]) -> Pending[Tensor]:
        """See `Exchange.start`."""
        merged = self._group.merge_scatter(out, lse, pieces)
        return self._start_here(out, lse, pieces) if merged is None else merged

    def _start_here(self, out: Tensor, lse: Tensor, pieces: Sequence[Piece]) -> Pending[Tensor]:
        head_dim = out.shape[-1]
        parts = [_packed(out, lse, piece) for piece in pieces]
        mine = pieces[self._group.rank]
        num_rows = lse[mine.rows].shape[0]
        arriving = parts[self._group.rank].numel()  # everybody sends as much of my piece as I have

        def finish(packed: list[Tensor]) -> Tensor:
            unpacked = [_unpacked(p, num_rows, mine, head_dim, out.dtype) for p in packed]
            weights, _ = shard_weights(torch.stack([m for _, m in unpacked]))  # [W, n, heads]
            merged = weighted_sum(
                torch.stack([o for o, _ in unpacked]),  # [W, n, c]
                weights[..., _head_of_column(mine.columns, head_dim, out.device)],
            )
            return merged.to(out.dtype)

        return _Then(self._group.all_to_all(parts, [arriving] * self._group.size), finish)


class GatherScatter:
    """Gathers LSEs, rescales partials to the whole softmax, and reduce-scatters them in float32.

    Args:
        group: the DCP group.
    """

    def __init__(self, group: Group) -> None:
        self._group = group

    def start(self, out: Tensor, lse: Tensor, pieces: Sequence[Piece]) -> Pending[Tensor]:
        """See `Exchange.start`."""
        rank, size, (num_rows, num_heads) = self._group.rank, self._group.size, lse.shape
        gathered = self._group.all_gather(lse, [num_rows] * size).wait().view(size, num_rows, num_heads)
        plan, dtype = plan_pieces(pieces, num_rows, out.shape[-1]), out.dtype
        share = share_of(out, gathered, rank=rank, pieces=pieces)
        return _Then(
            self._group.reduce_scatter(share, plan.sizes),
            lambda total: rounded(total, dtype).view(plan.shapes[rank]),
        )


def make_exchange(name: str, group: Group) -> Exchange:
    """The exchange that `--dcp-comm-backend` names, `a2a` or `ag_rs`."""
    exchanges: dict[str, Callable[[Group], Exchange]] = {"a2a": AllToAll, "ag_rs": GatherScatter}
    return exchanges[name](group)


def _part(out: Tensor, piece: Piece) -> Tensor:
    """[n, c]: a piece of [R, H, D]."""
    return out[piece.rows].flatten(1)[:, piece.columns.start : piece.columns.stop]


def _packed(out: Tensor, lse: Tensor, piece: Piece) -> Tensor:
    """A piece of partials and their LSE as bytes, so that one message carries both."""
    heads = piece.heads(out.shape[-1])
    part_lse = lse[piece.rows][:, heads.start : heads.stop]
    packed = torch.cat([_bytes(part_lse), _bytes(_part(out, piece))])
    return pad(packed, (0, -packed.numel() % LSE_BYTES))  # the next message begins on a float again


def _unpacked(
    packed: Tensor, rows: int, piece: Piece, head_dim: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """([n, c], [n, heads]) out of what `_packed` made of the same piece on another rank."""
    heads, width = piece.heads(head_dim).size, piece.columns.size
    lse_end = rows * heads * LSE_BYTES
    out = packed[lse_end : lse_end + rows * width * dtype.itemsize].view(dtype)
    return out.view(rows, width), packed[:lse_end].view(torch.float32).view(rows, heads)


def _bytes(x: Tensor) -> Tensor:
    return x.contiguous().flatten().view(torch.uint8)


@cache
def _head_of_column(columns: Span, head_dim: int, device: torch.device) -> Tensor:
    """[c]: for each column of a piece, which of the piece's heads it belongs to."""
    numbers = torch.arange(columns.start, columns.stop, device=device)
    return numbers // head_dim - columns.start // head_dim
