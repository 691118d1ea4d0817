"""Slots of a rank's part of the cache: where vectors of tokens are put, and how they are seen again.

    plain    elements as they are; kernels read them where they lie
    scaled   8 bits an element, and a scale for each token, head and part of its vector

Knows blocks by number. Knows no requests, and not what the vectors are.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from kvspan.attention.putting import Writes, choose_put
from kvspan.attention.scaled import LIMITS, SCALE_DTYPE, Scaled
from kvspan.native import prefer_huge_pages


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotShape:
    """What a slot holds.

    Args:
        num_heads: Hkv, vectors of a token.
        parts: elements of each part of a vector; together they are D.
        block_size: B, tokens of a block.
    """

    num_heads: int
    parts: tuple[int, ...]
    block_size: int

    @property
    def dim(self) -> int:
        """D, elements of a vector."""
        return sum(self.parts)

    def of(self, num_blocks: int, last: int) -> tuple[int, ...]:
        """[N, Hkv, B, last]: a head's slots of a block lie together, so a kernel reads them in runs."""
        return num_blocks, self.num_heads, self.block_size, last


class Slots(Protocol):
    """Vectors of tokens, [N, Hkv, B, D]."""

    @property
    def all(self) -> Tensor | Scaled:
        """The vectors, where they lie."""
        ...

    @property
    def tensors(self) -> Sequence[Tensor]:
        """What is allocated."""
        ...

    def allocate(self, num_blocks: int) -> None:
        """Makes room for `num_blocks` blocks; their content is undefined until written."""
        ...

    def put(self, rows: Tensor, writes: Writes) -> None:
        """Stores those of rows [R, Hkv, D] that live here."""
        ...

    def read(self, blocks: Tensor, offsets: Tensor) -> Tensor:
        """Vectors in the dtype of the computation.

        Args:
            blocks: [n] int64.
            offsets: [n] int64, the place in the block of each.

        Returns:
            [n, Hkv, D].
        """
        ...

    def rounded(self, rows: Tensor) -> Tensor:
        """Rows [R, Hkv, D] as `read` would give them after `put`."""
        ...


class PlainSlots:
    """Elements as they are.

    Args:
        shape: what a slot holds.
        dtype: of the elements.
        device: where they lie.
    """

    def __init__(self, shape: SlotShape, *, dtype: torch.dtype, device: torch.device) -> None:
        self._shape, self._dtype, self._device = shape, dtype, device
        self._put = choose_put(device)
        self.allocate(0)

    @property
    def all(self) -> Tensor:
        """See `Slots.all`."""
        return self._all

    @property
    def tensors(self) -> Sequence[Tensor]:
        """See `Slots.tensors`."""
        return (self._all,)

    def allocate(self, num_blocks: int) -> None:
        """See `Slots.allocate`."""
        shape = self._shape.of(num_blocks, self._shape.dim)
        self._all = _room(shape, self._dtype, self._device)

    def put(self, rows: Tensor, writes: Writes) -> None:
        """See `Slots.put`."""
        self._put(self._all, rows, writes)

    def read(self, blocks: Tensor, offsets: Tensor) -> Tensor:
        """See `Slots.read`."""
        return self._all[blocks, :, offsets]

    def rounded(self, rows: Tensor) -> Tensor:
        """See `Slots.rounded`."""
        return rows.to(self._dtype)


class ScaledSlots:
    """8 bits an element, and a scale for each token, head and part; `Scaled.of` says how near they are.

    Args:
        shape: what a slot holds.
        dtype: of the elements, one of `LIMITS`.
        seen_dtype: of the computation.
        device: where they lie.
    """

    def __init__(
        self, shape: SlotShape, *, dtype: torch.dtype, seen_dtype: torch.dtype, device: torch.device
    ) -> None:
        self._shape, self._dtype, self._seen_dtype, self._device = shape, dtype, seen_dtype, device
        self._put = choose_put(device)
        self.allocate(0)

    @property
    def all(self) -> Scaled:
        """See `Slots.all`."""
        return self._all

    @property
    def tensors(self) -> Sequence[Tensor]:
        """See `Slots.tensors`."""
        return self._all.codes, self._all.scales

    def allocate(self, num_blocks: int) -> None:
        """See `Slots.allocate`."""
        codes, scales = (
            self._shape.of(num_blocks, last) for last in (self._shape.dim, len(self._shape.parts))
        )
        self._all = Scaled(
            _room(codes, self._dtype, self._device),
            torch.empty(scales, dtype=SCALE_DTYPE, device=self._device),
            self._shape.parts,
            self._seen_dtype,
        )

    def put(self, rows: Tensor, writes: Writes) -> None:
        """See `Slots.put`."""
        self._put(self._all, rows, writes)

    def read(self, blocks: Tensor, offsets: Tensor) -> Tensor:
        """See `Slots.read`."""
        return self._all.slots(blocks, offsets)

    def rounded(self, rows: Tensor) -> Tensor:
        """See `Slots.rounded`."""
        coded = Scaled.of(rows, self._shape.parts, codes=self._dtype)
        return replace(coded, dtype=self._seen_dtype).written_out()


def make_slots(
    shape: SlotShape, *, dtype: torch.dtype, seen_dtype: torch.dtype, device: torch.device
) -> Slots:
    """Slots of a dtype: scaled if it has 8 bits.

    Args:
        shape: what a slot holds.
        dtype: of the stored elements.
        seen_dtype: of the computation; elements of more than 8 bits are seen as they are stored.
        device: where they lie.
    """
    if dtype in LIMITS:
        return ScaledSlots(shape, dtype=dtype, seen_dtype=seen_dtype, device=device)
    return PlainSlots(shape, dtype=dtype, device=device)


def seen_dtype(stored: torch.dtype, computed: torch.dtype) -> torch.dtype:
    """The dtype in which kernels see a cache of `stored` elements in a model of `computed` ones."""
    return computed if stored in LIMITS else stored


def _room(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Undefined elements, in huge pages where there are such: a step reads the cache in long runs."""
    room = torch.empty(shape, dtype=dtype, device=device)
    if device.type == "cpu":
        prefer_huge_pages(room.data_ptr(), room.nbytes)
    return room
