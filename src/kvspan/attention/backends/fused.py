"""torch's own fused attention with LSE, on CPU and CUDA: what serves until a faster kernel is there.

A sequence's blocks are gathered into one dense [Hkv, K, D], and all query heads of a KV head go through
the fused operator as rows of one problem, so that keys are read once for the group. Query rows are
taken in tiles. The keys that all rows of a tile see need no mask; the few on the diagonal, which only
some see, get a small one; the two partial results are merged like any others, and the causal
triangle's empty half is never computed.
"""

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvspan.attention.contract import Cached, Capabilities, KeyIndex, mergeable, written_out
from kvspan.attention.merge import merge_shards

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
        self, query: Tensor, keys: Cached, values: Cached, index: KeyIndex, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See `contract.Kernel`."""
        keys, values, index = written_out(keys, values, index)
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
            for tile in _tiles(rows, query.shape[1] // keys.shape[1]):
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
        q = query[rows]
        n, heads, dim = q.shape
        kv_heads, group = k.shape[0], heads // k.shape[0]
        q = q.view(n, kv_heads, group, dim).permute(1, 2, 0, 3).reshape(kv_heads, 1, group * n, dim)
        parts = [
            _attend(q, k[:, None, keys], v[:, None, keys], sees, group, scale)
            for keys, sees in _key_ranges(index.first[rows], index.last[rows], q.device)
        ]  # [Hkv, 1, G * n, D] and [Hkv, 1, G * n] each
        if not parts:
            return
        part, part_lse = merge_shards(
            torch.stack([o[:, 0] for o, _ in parts]), torch.stack([m[:, 0] for _, m in parts])
        )
        part = part[..., : out.shape[-1]].reshape(kv_heads, group, n, -1)  # less what was padded
        out[rows] = part.permute(2, 0, 1, 3).flatten(1, 2)
        lse[rows] = part_lse.view(kv_heads, group, n).permute(2, 0, 1).flatten(1, 2)


def _begin_with(keys: Tensor, values: Tensor) -> bool:
    """Whether the values are a view of the first columns of the keys."""
    return values.data_ptr() == keys.data_ptr() and values.stride() == keys.stride()


def _dense(blocks: Tensor, table: Tensor, num_keys: int) -> Tensor:
    """[Hkv, K, D]: the first `num_keys` local tokens of a sequence, out of [N, Hkv, B, D]."""
    _, kv_heads, block_size, dim = blocks.shape
    used = blocks[table[: -(-num_keys // block_size)]]
    return used.transpose(0, 1).reshape(kv_heads, -1, dim)[:, :num_keys]


def _tiles(rows: slice, group: int) -> Iterator[slice]:
    """Cuts a sequence's rows so that a tile's mask stays small."""
    size = max(TILE_ROWS // group, 1)
    for start in range(rows.start, rows.stop, size):
        yield slice(start, min(start + size, rows.stop))


def _key_ranges(
    first: Bounds, last: Bounds, device: torch.device
) -> Iterator[tuple[slice, Tensor | None]]:
    """Cuts a tile's keys into those that all its rows see, and the few before and after them.

    Yields:
        Ranges of keys, none empty, each with [n, K] bool "row sees key"; None = every row sees all.
    """
    rows = np.flatnonzero(last > first)  # a row that sees nothing must not empty the common range
    if not len(rows):
        return
    lowest, highest = int(first[rows].min()), int(last[rows].max())
    start = min(int(first[rows].max()), highest)
    stop = max(int(last[rows].min()), start)
    everybody = len(rows) == len(first)
    lo, hi = (torch.from_numpy(bound).to(device)[:, None] for bound in (first, last))
    for a, b in ((lowest, start), (start, stop), (stop, highest)):
        if a < b:
            place = torch.arange(a, b, device=device)
            common = a == start and everybody
            yield slice(a, b), None if common and b == stop else (lo <= place) & (place < hi)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, sees: Tensor | None, group: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Fused attention and its natural-log LSE; `sees` [n, K] holds for each of `group` heads.

    The operators want queries, keys and values of one width: narrower ones get zeros, which change no
    score, and columns of zeros in the output.
    """
    q, k, v = (_padded(x, max(k.shape[-1], v.shape[-1])) for x in (q, k, v))
    bias = None
    if sees is not None:
        sees = sees.repeat(group, 1)
        bias = torch.zeros(sees.shape, dtype=q.dtype, device=q.device).masked_fill_(~sees, -torch.inf)
    out, lse = _fused(q, k, v, bias, scale)
    lse = mergeable(lse)
    if sees is not None:  # where a mask hides every key, torch answers LSE 0 and not -inf
        lse = lse.masked_fill(~sees.any(-1), -torch.inf)
    return out, lse


def _fused(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """torch's operator for the device; `bias` [G * n, K] in the query's dtype."""
    if q.device.type == "cpu":
        mask = None if bias is None else bias[None, None]
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, False, attn_mask=mask, scale=scale
        )
        return out, lse
    mask = None if bias is None else _aligned(bias).expand(q.shape[0], 1, -1, -1)
    out, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
        q, k, v, mask, True, 0.0, False, scale=scale
    )
    return out, lse[..., : q.shape[2]]  # the operator pads the rows of its LSE


def _padded(x: Tensor, width: int) -> Tensor:
    return torch.nn.functional.pad(x, (0, width - x.shape[-1]))


def _aligned(bias: Tensor) -> Tensor:
    """The same bias in rows whose stride is a multiple of 8, as the CUDA operator wants them."""
    width = bias.shape[-1]
    return torch.nn.functional.pad(bias, (0, -width % 8))[..., :width]
