"""Inputs of operators, for tests and benchmarks alike. A case's `str` reads like a sentence."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from kvspan.attention.contract import Cached, KeyIndex, Need
from kvspan.attention.scaled import Scaled

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class SequenceRows:
    """One sequence's rows in a step, on one rank.

    Args:
        first: first visible local key of each row.
        last: one past the last visible local key of each row.
    """

    first: tuple[int, ...]
    last: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCase:
    """Partial attention over one rank's shard.

    Args:
        name: what is special about it.
        heads: (query heads, KV heads).
        head_dim: D.
        value_dim: Dv; None = D.
        latent: whether values are the first Dv columns of the keys.
        block_size: B.
        dtype: of queries, keys and values.
        codes: in which the cache holds them; None = as they are.
        sequences: rows and what they see.
        seed: of the random inputs.
    """

    name: str
    heads: tuple[int, int]
    head_dim: int
    block_size: int
    dtype: torch.dtype
    sequences: tuple[SequenceRows, ...]
    value_dim: int | None = None
    latent: bool = False
    codes: torch.dtype | None = None
    seed: int = 0

    def __str__(self) -> str:
        heads, kv_heads = self.heads
        dtype = str(self.dtype).removeprefix("torch.")
        dims = f"hd{self.head_dim}" + (f"v{self.value_dim}" if self.value_dim else "")
        kind = "mla" if self.latent else "gqa"
        codes = f"-{self.codes}".replace("torch.", "") if self.codes else ""
        return f"{self.name}-{kind}{heads}x{kv_heads}-{dims}-B{self.block_size}-{dtype}{codes}"

    @property
    def need(self) -> Need:
        """What a kernel must be able to do."""
        value_dim = self.value_dim or self.head_dim
        return Need(device="cpu", dtype=self.dtype, head_dim=self.head_dim, value_dim=value_dim)

    def inputs(self, device: str = "cpu") -> tuple[Tensor, Cached, Cached, KeyIndex, float]:
        """Arguments of a `contract.Kernel`. Slots that no row may see hold NaN."""
        generator = torch.Generator().manual_seed(self.seed)
        counts = [-(-max(s.last, default=0) // self.block_size) for s in self.sequences]
        num_blocks = sum(counts) + 3
        order = torch.randperm(num_blocks, generator=generator)
        heads, kv_heads = self.heads
        shape = (num_blocks, kv_heads, self.block_size)
        dims = (self.need.head_dim, self.need.value_dim)
        keys, values = (torch.full((*shape, dim), torch.nan, dtype=self.dtype) for dim in dims)
        tables = [order[a:b] for a, b in pairwise(np.cumsum([0, *counts]))]
        for sequence, table in zip(self.sequences, tables, strict=True):
            token = torch.arange(max(sequence.last, default=0))
            place = (table[token // self.block_size], slice(None), token % self.block_size)
            for cache in (keys, values):
                content = torch.randn(len(token), kv_heads, cache.shape[-1], generator=generator)
                cache[place] = content.to(self.dtype)
        starts = np.cumsum([0, *(len(s.last) for s in self.sequences)]).tolist()
        query = torch.randn(starts[-1], heads, self.head_dim, generator=generator).to(self.dtype)
        index = KeyIndex(
            row_starts=tuple(starts),
            tables=tuple(table.to(device) for table in tables),
            first=np.array([f for s in self.sequences for f in s.first], dtype=np.int64),
            last=np.array([x for s in self.sequences for x in s.last], dtype=np.int64),
        )
        scale = self.head_dim**-0.5
        return query.to(device), *self._cached(keys.to(device), values.to(device)), index, scale

    def _cached(self, keys: Tensor, values: Tensor) -> tuple[Cached, Cached]:
        value_dim = values.shape[-1]
        if self.codes is None:
            return keys, keys[..., :value_dim] if self.latent else values
        parts = (value_dim, keys.shape[-1] - value_dim) if self.latent else (keys.shape[-1],)
        codes = Scaled.of(keys, tuple(part for part in parts if part), codes=self.codes)
        if self.latent:
            return codes, codes.first_part
        return codes, Scaled.of(values, (value_dim,), codes=self.codes)


def attention_cases() -> Iterator[AttentionCase]:
    """Cases that every kernel must get right, or refuse."""
    for name, sequences in _ROWS.items():
        for heads, head_dim, value_dim, latent in _SHAPES:
            for dtype in DTYPES:
                yield AttentionCase(
                    name=name,
                    heads=heads,
                    head_dim=head_dim,
                    value_dim=value_dim,
                    latent=latent,
                    block_size=8,
                    dtype=dtype,
                    sequences=sequences,
                )
    for name in ("decode", "mixed"):
        for heads, head_dim, value_dim, block_size in _WIDE:
            for dtype in DTYPES:
                yield AttentionCase(
                    name=name,
                    heads=heads,
                    head_dim=head_dim,
                    value_dim=value_dim,
                    latent=value_dim is not None,
                    block_size=block_size,
                    dtype=dtype,
                    sequences=_ROWS[name],
                )


def coded_cases() -> Iterator[AttentionCase]:
    """The same over caches of 8 bits, in fewer combinations."""
    for i, case in enumerate(attention_cases()):
        yield replace(case, codes=(torch.int8, torch.float8_e4m3fn)[i % 2])


_SHAPES: tuple[tuple[tuple[int, int], int, int | None, bool], ...] = (
    ((1, 1), 8, None, False),
    ((4, 4), 16, None, False),
    ((9, 3), 64, None, False),
    ((8, 1), 32, None, False),
    ((6, 2), 80, None, False),
    ((4, 2), 24, 16, False),
    ((4, 2), 16, 24, False),
    ((5, 1), 40, 32, True),
    ((2, 1), 576, 512, True),
)
"""(query heads, KV heads), head_dim, value_dim, whether values are a part of the keys."""


def _decode(*lens: int) -> tuple[SequenceRows, ...]:
    return tuple(SequenceRows((0,), (n,)) for n in lens)


def _rows(last: Sequence[int], first: Sequence[int] | None = None) -> SequenceRows:
    return SequenceRows(tuple(first or [0] * len(last)), tuple(last))


_WIDE = (
    ((4, 1), 72, None, 24),
    ((4, 2), 96, None, 16),
    ((10, 2), 128, None, 64),
    ((3, 1), 192, 128, 16),
    ((2, 2), 256, None, 8),
    ((16, 1), 576, 512, 16),
    ((128, 1), 576, 512, 64),
)
"""Heads, D, Dv where values are a view of the keys, B: sizes of models, and some of none."""

_ROWS: dict[str, tuple[SequenceRows, ...]] = {
    "decode": _decode(1, 65, 8, 40),
    "empty-shards": _decode(0, 5, 0),
    "all-empty": _decode(0, 0),
    "no-rows": (),
    "causal-chunk": (_rows(range(1, 38)),),
    "chunk-over-context": (_rows(range(51, 70)), _rows([3])),
    "interleaved-bounds": (_rows([5, 5, 5, 6, 6, 6, 6, 7]),),  # W=4: rows 17..24 on rank 0
    "first-rows-see-nothing": (_rows([0, 0, 0, 1, 2, 3]), _rows([0, 0])),
    "window": (_rows(range(10, 20), first=range(6, 16)),),
    "window-of-nothing": (_rows([4, 9, 9], first=[4, 5, 9]),),
    "mixed": (_rows([70]), _rows(range(1, 20)), _rows([0]), _rows([30, 31, 32])),
}
