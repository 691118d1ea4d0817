"""Slots of a rank's part of the cache: where vectors of tokens are put, and how they are seen again.

    plain    elements as they are; kernels read them where they lie
    scaled   8 bits an element, and a scale for each token, head and part of its vector; the blocks that
             a step sees are written out in the dtype of the computation, and its tables point there

Knows blocks by number. Knows no requests, and not what the vectors are.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from kvspan.attention.contract import KeyIndex
from kvspan.native import prefer_huge_pages

LIMITS = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""Dtypes of 8 bits -> the largest number that they hold."""
SCALE_DTYPE = torch.bfloat16
"""Vectors are divided by the scale as it is stored, so its own rounding costs nothing."""


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
    def tensors(self) -> Sequence[Tensor]:
        """What is allocated."""
        ...

    def allocate(self, num_blocks: int) -> None:
        """Makes room for `num_blocks` blocks; their content is undefined until written."""
        ...

    def put(self, rows: Tensor, writes: Writes) -> None:
        """Stores those of rows [R, Hkv, D] that live here."""
        ...

    def seen(self, index: KeyIndex) -> tuple[Tensor, KeyIndex]:
        """What a step's rows see, in the dtype of the computation.

        Returns:
            blocks [n, Hkv, B, D], and the index with tables that point into them.
        """
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
        self.allocate(0)

    @property
    def tensors(self) -> Sequence[Tensor]:
        """See `Slots.tensors`."""
        return (self.all,)

    def allocate(self, num_blocks: int) -> None:
        """See `Slots.allocate`."""
        shape = self._shape.of(num_blocks, self._shape.dim)
        self.all = _room(shape, self._dtype, self._device)

    def put(self, rows: Tensor, writes: Writes) -> None:
        """See `Slots.put`."""
        _put(self.all, rows[writes.rows].to(self._dtype), writes)

    def seen(self, index: KeyIndex) -> tuple[Tensor, KeyIndex]:
        """See `Slots.seen`: all blocks, where they lie."""
        return self.all, index


class ScaledSlots:
    """8 bits an element, and a scale for each token, head and part.

    An int8 is within 1/254 of the largest element of its part; an e4m3 within 1/16 of its own value, or,
    for elements under 2^-15 of the largest, within 2^-19 of that.

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
        self.allocate(0)

    @property
    def tensors(self) -> Sequence[Tensor]:
        """See `Slots.tensors`."""
        return self._codes, self._scales

    def allocate(self, num_blocks: int) -> None:
        """See `Slots.allocate`."""
        codes, scales = (
            self._shape.of(num_blocks, last) for last in (self._shape.dim, len(self._shape.parts))
        )
        # Bytes, since not every device indexes elements of 8-bit floats.
        self._codes = _room(codes, torch.uint8, self._device)
        self._scales = torch.empty(scales, dtype=SCALE_DTYPE, device=self._device)

    def put(self, rows: Tensor, writes: Writes) -> None:
        """See `Slots.put`."""
        parts = rows[writes.rows].float().split_with_sizes(self._shape.parts, dim=-1)
        limit = LIMITS[self._dtype]
        largest = torch.stack([part.abs().amax(dim=-1) for part in parts], dim=-1)  # [n, Hkv, parts]
        scales = (largest / limit).to(SCALE_DTYPE)
        scales = scales.masked_fill(scales == 0.0, 1.0)
        scaled = torch.cat(parts, dim=-1) / self._spread(scales)
        whole = scaled if self._dtype.is_floating_point else scaled.round()
        codes = whole.clamp(-limit, limit).to(self._dtype)
        _put(self._codes, codes.view(torch.uint8), writes)
        _put(self._scales, scales, writes)

    def seen(self, index: KeyIndex) -> tuple[Tensor, KeyIndex]:
        """See `Slots.seen`: each block that a table names, once, written out."""
        named = torch.cat([*index.tables, self._no_blocks()])
        blocks, places = torch.unique(named, return_inverse=True)
        values = self._codes[blocks].view(self._dtype).to(self._seen_dtype)
        values *= self._spread(self._scales[blocks])
        tables = places.split([len(table) for table in index.tables] + [0])[:-1]
        return values, replace(index, tables=tuple(tables))

    def _spread(self, scales: Tensor) -> Tensor:
        """[..., parts] -> [..., D]: each element's scale, in the dtype of the computation."""
        sizes = torch.tensor(self._shape.parts, device=scales.device)
        return scales.to(self._seen_dtype).repeat_interleave(sizes, dim=-1)

    def _no_blocks(self) -> Tensor:
        return torch.zeros(0, dtype=torch.int64, device=self._device)


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


def _put(slots: Tensor, rows: Tensor, writes: Writes) -> None:
    """Writes rows [n, Hkv, D] to their places in [N, Hkv, B, D]."""
    slots[writes.blocks, :, writes.offsets] = rows
