"""The KV cache of one layer on one rank: keys and values, or latents. Knows no blocks' owners."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kvspan.attention.contract import KeyIndex
from kvspan.attention.putting import Writes
from kvspan.attention.scaled import Scaled
from kvspan.attention.slots import Slots, SlotShape, make_slots


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheFormat:
    """How the cache is kept on a rank, the same in all layers.

    Args:
        block_size: B, tokens of a block.
        dtype: of the stored elements; 8 bits come with scales.
        computed: dtype of the model, in which 8 bits are seen.
        device: where they lie.
    """

    block_size: int
    dtype: torch.dtype
    computed: torch.dtype
    device: torch.device

    def slots(self, num_heads: int, *parts: int) -> Slots:
        """Slots for vectors of some parts, each of which has a scale of its own if there are scales."""
        shape = SlotShape(num_heads=num_heads, parts=parts, block_size=self.block_size)
        return make_slots(shape, dtype=self.dtype, seen_dtype=self.computed, device=self.device)


@dataclass(frozen=True, slots=True)
class Seen:
    """What a step's rows see, as a kernel takes it.

    Args:
        keys: [N, Hkv, B, D].
        values: [N, Hkv, B, Dv]; may be a view of the first Dv columns of `keys`.
        index: whose tables name blocks of these.
    """

    keys: Tensor | Scaled
    values: Tensor | Scaled
    index: KeyIndex

    @property
    def dtype(self) -> torch.dtype:
        """That queries have, and results."""
        return self.keys.dtype

    def key_blocks(self, numbers: Tensor) -> Tensor:
        """[n, Hkv, B, D] in `dtype`: some blocks of keys."""
        return self.keys.blocks(numbers) if isinstance(self.keys, Scaled) else self.keys[numbers]


class CacheStore(Protocol):
    """The cache of one layer, whatever it keeps."""

    @property
    def tensors(self) -> Sequence[Tensor]:
        """What is allocated."""
        ...

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token."""
        ...

    def allocate(self, num_blocks: int) -> None:
        """Makes room for `num_blocks` blocks; their content is undefined until written."""
        ...

    def write_cached(self, rows: Tensor, writes: Writes) -> None:
        """Stores rows that come as a slot holds them.

        Args:
            rows: [R, Hkv, elements of a head's slot]: a key and a value side by side, or a latent.
            writes: which rows, and where.
        """
        ...

    def read(self, blocks: Tensor, offsets: Tensor) -> Tensor:
        """What some slots hold, as `write_cached` takes it, in the dtype of the computation.

        Args:
            blocks: [n] int64.
            offsets: [n] int64, the place in the block of each.

        Returns:
            [n, Hkv, elements of a head's slot].
        """
        ...

    def seen(self, index: KeyIndex) -> Seen:
        """What the rows of a step see."""
        ...


class _Store:
    """What all stores do: they are some slots, side by side."""

    def __init__(self, block_size: int, *slots: Slots) -> None:
        self._slots, self._block_size = slots, block_size

    @property
    def tensors(self) -> Sequence[Tensor]:
        """See `CacheStore.tensors`."""
        return [tensor for slots in self._slots for tensor in slots.tensors]

    @property
    def bytes_per_token(self) -> int:
        """See `CacheStore.bytes_per_token`."""
        sizes = [tensor.itemsize * tensor.shape[1:].numel() for tensor in self.tensors]
        return sum(sizes) // self._block_size

    def allocate(self, num_blocks: int) -> None:
        """See `CacheStore.allocate`."""
        for slots in self._slots:
            slots.allocate(num_blocks)

    def read(self, blocks: Tensor, offsets: Tensor) -> Tensor:
        """See `CacheStore.read`."""
        return torch.cat([slots.read(blocks, offsets) for slots in self._slots], dim=-1)


class KvStore(_Store):
    """Keys and values of one layer, for this rank's KV heads and its share of every sequence.

    Args:
        cache: how the cache is kept.
        num_kv_heads: KV heads kept here.
        head_dim: elements of a key and of a value.
    """

    def __init__(self, cache: CacheFormat, *, num_kv_heads: int, head_dim: int) -> None:
        self._keys, self._values = (cache.slots(num_kv_heads, head_dim) for _ in range(2))
        super().__init__(cache.block_size, self._keys, self._values)

    def write(self, keys: Tensor, values: Tensor, writes: Writes) -> None:
        """Stores the rows that live here.

        Args:
            keys: [R, Hkv, D], after norm and rotary embedding.
            values: [R, Hkv, D].
            writes: which rows, and where.
        """
        self._keys.put(keys, writes)
        self._values.put(values, writes)

    def write_cached(self, rows: Tensor, writes: Writes) -> None:
        """See `CacheStore.write_cached`."""
        keys, values = rows.chunk(2, dim=-1)
        self.write(keys, values, writes)

    def rounded(self, keys: Tensor, values: Tensor) -> Tensor:
        """What `read` would give of rows [R, Hkv, D] after `write`: [R, Hkv, 2 D]."""
        return torch.cat([self._keys.rounded(keys), self._values.rounded(values)], dim=-1)

    def seen(self, index: KeyIndex) -> Seen:
        """See `CacheStore.seen`."""
        return Seen(self._keys.all, self._values.all, index)


class LatentStore(_Store):
    """Latents of one layer, for this rank's share of every sequence: one KV head for all query heads.

    A key is a latent and a rotated part; its value is the latent, a view of the key's first columns. The
    two parts differ in size, so each has its own scale if there are scales.

    Args:
        cache: how the cache is kept.
        latent_dim: Dv, elements of the latent.
        rotary_dim: elements of the rotated part.
    """

    def __init__(self, cache: CacheFormat, *, latent_dim: int, rotary_dim: int) -> None:
        self._latent_dim = latent_dim
        self._keys = cache.slots(1, latent_dim, rotary_dim)
        super().__init__(cache.block_size, self._keys)

    def write(self, keys: Tensor, writes: Writes) -> None:
        """Stores the rows that live here.

        Args:
            keys: [R, D]: the normed latent, and the rotated part after it.
            writes: which rows, and where.
        """
        self._keys.put(keys[:, None], writes)

    def write_cached(self, rows: Tensor, writes: Writes) -> None:
        """See `CacheStore.write_cached`."""
        self.write(rows[:, 0], writes)

    def rounded(self, keys: Tensor) -> Tensor:
        """What `read` would give of rows [R, D] after `write`: [R, 1, D]."""
        return self._keys.rounded(keys[:, None])

    def seen(self, index: KeyIndex) -> Seen:
        """See `CacheStore.seen`."""
        keys = self._keys.all
        latents = keys.first_part if isinstance(keys, Scaled) else keys[..., : self._latent_dim]
        return Seen(keys, latents, index)
