"""The tensors of the KV cache of one layer on one rank. Knows blocks by number and no requests."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Writes:
    """Which rows of a step this rank writes, and where.

    Args:
        rows: [n] int64, rows whose token lives on this rank.
        blocks: [n] int64, the block of each.
        offsets: [n] int64, the place in the block of each.
    """

    rows: Tensor
    blocks: Tensor
    offsets: Tensor


class CacheStore(Protocol):
    """What the cache of one layer keeps on this rank, however it comes by it.

    Args:
        keys: [N, Hkv, B, D].
        values: [N, Hkv, B, Dv]; may be a view of the first Dv columns of `keys`.
    """

    keys: Tensor
    values: Tensor

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token."""
        ...

    def allocate(self, num_blocks: int) -> None:
        """Makes room for `num_blocks` blocks; their content is undefined until written.

        A head's slots of a block lie together, [N, Hkv, B, D]: a kernel reads one head's keys in runs.
        """
        ...


class KvStore:
    """Keys and values of one layer, for this rank's KV heads and its share of every sequence.

    Args:
        num_kv_heads: KV heads kept here.
        head_dim: elements of a key and of a value.
        block_size: B, tokens of a block.
        dtype: of the stored elements.
        device: where they lie.
    """

    def __init__(
        self,
        *,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._block_shape = (num_kv_heads, block_size, head_dim)
        self._dtype, self._device = dtype, device
        self.allocate(0)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token, keys and values together."""
        heads, _, dim = self._block_shape
        return 2 * heads * dim * self._dtype.itemsize

    def allocate(self, num_blocks: int) -> None:
        """See `CacheStore.allocate`."""
        shape = (num_blocks, *self._block_shape)
        self.keys = torch.empty(shape, dtype=self._dtype, device=self._device)
        self.values = torch.empty_like(self.keys)

    def write(self, keys: Tensor, values: Tensor, writes: Writes) -> None:
        """Stores the rows that live here.

        Args:
            keys: [R, Hkv, D], after norm and rotary embedding.
            values: [R, Hkv, D].
            writes: which rows, and where.
        """
        _put(self.keys, keys, writes)
        _put(self.values, values, writes)


class LatentStore:
    """Latents of one layer, for this rank's share of every sequence: one KV head for all query heads.

    A key is a latent and a rotated part; its value is the latent, a view of the key's first columns.

    Args:
        key_dim: D, elements of a key.
        value_dim: Dv, elements of the latent.
        block_size: B, tokens of a block.
        dtype: of the stored elements.
        device: where they lie.
    """

    def __init__(
        self,
        *,
        key_dim: int,
        value_dim: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._block_shape, self._value_dim = (1, block_size, key_dim), value_dim
        self._dtype, self._device = dtype, device
        self.allocate(0)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token; its value takes none of its own."""
        heads, _, dim = self._block_shape
        return heads * dim * self._dtype.itemsize

    def allocate(self, num_blocks: int) -> None:
        """See `CacheStore.allocate`."""
        shape = (num_blocks, *self._block_shape)
        self.keys = torch.empty(shape, dtype=self._dtype, device=self._device)
        self.values = self.keys[..., : self._value_dim]

    def write(self, keys: Tensor, writes: Writes) -> None:
        """Stores the rows that live here.

        Args:
            keys: [R, D]: the normed latent, and the rotated part after it.
            writes: which rows, and where.
        """
        _put(self.keys, keys[:, None], writes)


def _put(slots: Tensor, rows: Tensor, writes: Writes) -> None:
    """Writes rows [R, Hkv, D] to their places in [N, Hkv, B, D]."""
    slots[writes.blocks, :, writes.offsets] = rows[writes.rows].to(slots.dtype)
