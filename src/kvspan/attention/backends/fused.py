"""torch's own fused attention with LSE, on CPU and CUDA: what serves until a faster kernel is there.

A sequence's blocks are gathered into one dense [Hkv, K, D], and all query heads of a KV head go through
the fused operator as rows of one problem, so that keys are read once for the group. Query rows are
taken in tiles, each of which ends its keys at the last one that the tile sees: most of the causal
triangle's empty half is never computed, and a mask stays small at any context.
"""

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvspan.attention.contract import Capabilities, KeyIndex

MASK_ELEMENTS = 1 << 22
"""Elements of the largest mask that one tile may need (8 MiB in bf16)."""
Bounds = NDArray[np.int64]
TILE_ROWS = 512
"""Rows (query tokens times query heads of a KV head) of the largest tile."""


class FusedKernel:
    """torch's flash attention on CPU, its memory-efficient attention on CUDA."""

    capabilities = Capabilities(
        devices=("cpu", "cuda"),
        dtypes=(torch.float32, torch.bfloat16, torch.float16),
    )

    def __call__(
        self, query: Tensor, keys: Tensor, values: Tensor, index: KeyIndex, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See `contract.Kernel`."""
        out = query.new_zeros(*query.shape[:2], values.shape[-1])
        lse = query.new_full(query.shape[:2], -torch.inf, dtype=torch.float32)
        for rows, table in index.sequences():
            num_keys = int(index.last[rows].max(initial=0))
            if num_keys == 0:  # the fused operators divide by the number of keys
                continue
            k = _dense(keys, table, num_keys)
            # A value that is the beginning of its key needs no second copy: the columns after it are
            # computed too, and dropped.
            v = k if _begin_with(keys, values) else _dense(values, table, num_keys)
            for tile in _tiles(rows, num_keys, query.shape[1] // keys.shape[1]):
                self._tile(query, k, v, index, tile, scale, out, lse)
        return out, lse

    @staticmethod
    def _tile(
        query: Tensor,
        k: Tensor,
        v: Tensor,
        index: KeyIndex,
        rows: slice,
        scale: float,
        out: Tensor,
        lse: Tensor,
    ) -> None:
        first, last = index.first[rows], index.last[rows]
        num_keys = int(last.max())
        sees = last > first
        if not sees.any():
            return
        q = query[rows]
        n, heads, dim = q.shape
        kv_heads, group = k.shape[0], heads // k.shape[0]
        q = q.view(n, kv_heads, group, dim).permute(1, 2, 0, 3).reshape(kv_heads, 1, group * n, dim)
        mask = _mask(first, last, num_keys, q)
        part, part_lse = _attend(
            q, k[:, None, :num_keys], v[:, None, :num_keys], mask, group, scale
        )  # [Hkv, 1, G * n, D or more], [Hkv, 1, G * n]
        part = part[..., : out.shape[-1]].reshape(kv_heads, group, n, -1).permute(2, 0, 1, 3)
        part = part.flatten(1, 2)
        part_lse = part_lse.reshape(kv_heads, group, n).permute(2, 0, 1).flatten(1, 2)
        if sees.all():
            out[rows], lse[rows] = part, part_lse
            return
        # Where a mask hides every key, torch answers LSE 0 and not -inf: keep only rows that see one.
        kept = torch.from_numpy(np.flatnonzero(sees)).to(query.device)
        out[rows][kept], lse[rows][kept] = part[kept], part_lse[kept]


def _begin_with(keys: Tensor, values: Tensor) -> bool:
    """Whether the values are a view of the first columns of the keys."""
    return values.data_ptr() == keys.data_ptr() and values.stride() == keys.stride()


def _dense(blocks: Tensor, table: Tensor, num_keys: int) -> Tensor:
    """[Hkv, K, D]: the first `num_keys` local tokens of a sequence, out of [N, Hkv, B, D]."""
    _, kv_heads, block_size, dim = blocks.shape
    used = blocks[table[: -(-num_keys // block_size)]]
    return used.transpose(0, 1).reshape(kv_heads, -1, dim)[:, :num_keys]


def _tiles(rows: slice, num_keys: int, group: int) -> Iterator[slice]:
    """Cuts a sequence's rows so that a tile's mask stays small."""
    size = max(min(TILE_ROWS, MASK_ELEMENTS // num_keys) // group, 1)
    for start in range(rows.start, rows.stop, size):
        yield slice(start, min(start + size, rows.stop))


def _mask(first: Bounds, last: Bounds, num_keys: int, q: Tensor) -> Tensor | None:
    """[n, K] in the query's dtype, 0 for a visible key and -inf for a hidden one; None = all visible."""
    if (first == 0).all() and (last == num_keys).all():
        return None
    place = torch.arange(num_keys, device=q.device)
    lo, hi = (torch.from_numpy(bound).to(q.device)[:, None] for bound in (first, last))
    hidden = (place < lo) | (place >= hi)
    return torch.zeros(hidden.shape, dtype=q.dtype, device=q.device).masked_fill_(hidden, -torch.inf)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, group: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Fused attention and its natural-log LSE; `mask` [n, K] stands for each of `group` heads.

    The operators want queries, keys and values of one width: narrower ones get zeros, which change no
    score, and columns of zeros in the output.
    """
    q, k, v = (_padded(x, max(k.shape[-1], v.shape[-1])) for x in (q, k, v))
    bias = None if mask is None else mask.repeat(group, 1)[None, None]
    if q.device.type == "cpu":
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, False, attn_mask=bias, scale=scale
        )
        return out, lse
    if bias is not None:
        bias = _aligned(bias).expand(q.shape[0], -1, -1, -1)
    out, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
        q, k, v, bias, True, 0.0, False, scale=scale
    )
    return out, lse[..., : q.shape[2]]  # the operator pads the rows of its LSE


def _padded(x: Tensor, width: int) -> Tensor:
    return torch.nn.functional.pad(x, (0, width - x.shape[-1]))


def _aligned(bias: Tensor) -> Tensor:
    """The same bias in rows whose stride is a multiple of 8, as the CUDA operator wants them."""
    width = bias.shape[-1]
    return torch.nn.functional.pad(bias, (0, -width % 8))[..., :width]
