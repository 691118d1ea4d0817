"""What a rank's partials contribute to attention over all keys, to be summed over the ranks in float32.

Knows pieces, LSEs and the two ways to compute: the native kernel, which a tape can play, and torch's
operators. Knows no groups.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from kvspan.attention.merge import shard_weights, weighted_sum
from kvspan.comm.group import Piece
from kvspan.comm.pieces import plan_pieces
from kvspan.native import extension, native_path


def share_of(out: Tensor, lse: Tensor, *, rank: int, pieces: Sequence[Piece]) -> Tensor:
    """Partials times the share that their keys have in the softmax over all keys.

    Args:
        out: [R, H, D], this rank's partials over its own keys.
        lse: [W, R, H] float32 of all ranks, natural log; not finite = no key seen there.
        rank: of whose partials these are.
        pieces: what each rank owns, in order of rank.

    Returns:
        float32, everybody's piece [n, c] of it, flat and one behind the other.
    """
    if _is_native(out):
        return _native_share(out, lse, rank, pieces)
    weights, _ = shard_weights(lse)
    share = weighted_sum(out[None], weights[rank, ..., None][None])  # [R, H, D] float32
    parts = [(share[piece.rows].flatten(1), piece.columns) for piece in pieces]
    return torch.cat([part[:, columns.start : columns.stop].flatten() for part, columns in parts])


def rounded(total: Tensor, dtype: torch.dtype) -> Tensor:
    """A sum of shares, float32, in the dtype of attention's output."""
    if total.dtype == dtype or not _is_native(total):
        return total.to(dtype)
    made = torch.empty(total.shape, dtype=dtype)
    extension().round_to(_native_dtypes()[dtype], total.data_ptr(), total.numel(), made.data_ptr())
    return made


def _is_native(out: Tensor) -> bool:
    return native_path().isa is not None and out.device.type == "cpu" and out.dtype in _native_dtypes()


def _native_share(out: Tensor, lse: Tensor, rank: int, pieces: Sequence[Piece]) -> Tensor:
    num_rows, num_heads, head_dim = out.shape
    plan = plan_pieces(pieces, num_rows, head_dim)
    num_ranks, out, lse = len(lse), out.contiguous(), lse.contiguous()
    weights = lse.new_empty(num_ranks + 2, num_rows, num_heads)
    made = lse.new_empty(sum(plan.sizes))
    extension().take_share(
        _native_dtypes()[out.dtype],
        out.data_ptr(),
        num_rows,
        num_heads,
        head_dim,
        lse.data_ptr(),
        num_ranks,
        rank,
        plan.numbers,
        weights.data_ptr(),
        made.data_ptr(),
    )
    return made


@cache
def _native_dtypes() -> dict[torch.dtype, Any]:
    """What the native kernel rescales."""
    dtypes = extension().Dtype
    return {torch.float32: dtypes.f32, torch.bfloat16: dtypes.bf16, torch.float16: dtypes.f16}
