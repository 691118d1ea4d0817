"""Made-up keys and values, so that decoding over a long context can be measured without its prefill.

What a token gets follows from a seed, its layer, its head and its position. No layout comes into it, so
ranks that share a sequence make up the very shards that one rank would have. Elements are drawn evenly
from the 256 numbers -2, -2 + 1/64, .. 2 - 1/64, which bf16 and fp16 hold exactly.

Knows slots and tables. Knows no model's layers and measures nothing.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from kvspan.attention.kv_store import CacheStore
from kvspan.attention.putting import Writes
from kvspan.cache.table import RankTable
from kvspan.config.model import ModelConfig
from kvspan.layout import NO_SLOT
from kvspan.topology import Span

STEP = 1 / 64
"""Between neighbouring values, whose standard deviation is 1.15: about that of normed keys."""
_POSITIONS_A_DRAW = 16
"""Positions that share a random stream: a rank draws whole blocks of its own and little of others'."""
_POSITIONS_AT_ONCE = 1024
"""Bounds the memory of what has been drawn and not been written."""


class Filler:
    """Writes made-up keys and values to a rank's part of the cache.

    Args:
        stores: of each layer.
        model: sizes.
        kv_heads: KV heads that this rank keeps.
        block_size: B.
        dtype: in which they are handed to the stores.
        device: where the stores lie.
    """

    def __init__(
        self,
        stores: Sequence[CacheStore],
        model: ModelConfig,
        *,
        kv_heads: Span,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._stores, self._kv_heads, self._block_size = stores, kv_heads, block_size
        self._shape = (model.num_layers, model.num_kv_heads, model.head_dims.cached)
        self._dtype, self._device = dtype, device

    def fill(self, table: RankTable, *, num_tokens: int, seed: int) -> None:
        """Fills a sequence from its beginning.

        Args:
            table: where it lies.
            num_tokens: tokens to fill; the table has units for them.
            seed: of the sequence.
        """
        for start in range(0, num_tokens, _POSITIONS_AT_ONCE):
            slots = table.slots(start, min(start + _POSITIONS_AT_ONCE, num_tokens))
            mine = np.flatnonzero(slots != NO_SLOT)
            if len(mine):
                self._write(made_up(start + mine, seed=seed, shape=self._shape), slots[mine])

    def _write(self, drawn: NDArray[np.int8], slots: NDArray[np.int64]) -> None:
        """Writes [n, layers, Hkv, D] to the slots [n]."""
        blocks, offsets = (
            torch.from_numpy(part).to(self._device) for part in np.divmod(slots, self._block_size)
        )
        writes = Writes(blocks, offsets)
        heads = slice(self._kv_heads.start, self._kv_heads.stop)
        for layer, store in enumerate(self._stores):
            rows = torch.from_numpy(np.ascontiguousarray(drawn[:, layer, heads]))
            store.write_cached(rows.to(self._device, self._dtype) * STEP, writes)


def made_up(
    positions: NDArray[np.integer], *, seed: int, shape: tuple[int, int, int]
) -> NDArray[np.int8]:
    """What tokens at some positions of a sequence get, in units of `STEP`.

    Args:
        positions: [n] integers, ascending.
        seed: of the sequence.
        shape: layers, KV heads of the whole model, elements of a head's slot.

    Returns:
        [n, layers, Hkv, elements] int8.
    """
    draws, which = np.unique(positions // _POSITIONS_A_DRAW, return_inverse=True)
    size = _POSITIONS_A_DRAW * int(np.prod(shape))
    drawn = np.empty((len(draws), size), np.int8)
    for row, draw in zip(drawn, draws, strict=True):
        stream = np.random.Philox(key=np.array([seed, draw], np.uint64))
        row[:] = stream.random_raw(size // 8).view(np.int8)
    by_position = drawn.reshape(len(draws), _POSITIONS_A_DRAW, *shape)
    chosen: NDArray[np.int8] = by_position[which, positions % _POSITIONS_A_DRAW]
    return chosen
