"""Writing vectors of tokens into their slots: in torch, on any device, and in one native call on a CPU.

Both leave the same bits. Knows no requests, and not what the vectors are.
"""

from dataclasses import dataclass
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from kvspan.attention.scaled import Scaled
from kvspan.native import extension, native_path

NO_BLOCK = -1
"""In tensors of blocks: nowhere. The block of `layout.NO_SLOT`."""


@dataclass(frozen=True, slots=True)
class Writes:
    """Where this rank writes the rows of a step.

    Args:
        blocks: [R] int64, the block of each; `NO_BLOCK` = another rank keeps its token.
        offsets: [R] int64, the place in the block of each.
    """

    blocks: Tensor
    offsets: Tensor


class Put(Protocol):
    """Stores those of a step's rows that live here."""

    def __call__(self, slots: Tensor | Scaled, rows: Tensor, writes: Writes) -> None:
        """Writes.

        Args:
            slots: [N, Hkv, B, D].
            rows: [R, Hkv, D]; become codes if the slots hold such.
            writes: where.
        """
        ...


def put_by_torch(slots: Tensor | Scaled, rows: Tensor, writes: Writes) -> None:
    """Fulfils `Put` with torch's operators."""
    somewhere = writes.blocks != NO_BLOCK
    blocks, offsets = writes.blocks[somewhere], writes.offsets[somewhere]
    chosen = rows[somewhere]
    if not isinstance(slots, Scaled):
        slots[blocks, :, offsets] = chosen.to(slots.dtype)
        return
    coded = Scaled.of(chosen, slots.parts, codes=slots.codes.dtype)
    # Bytes, since not every device indexes elements of 8-bit floats.
    slots.codes.view(torch.uint8)[blocks, :, offsets] = coded.codes.view(torch.uint8)
    slots.scales[blocks, :, offsets] = coded.scales


def put_natively(slots: Tensor | Scaled, rows: Tensor, writes: Writes) -> None:
    """Fulfils `Put` with the native extension, for slots of a CPU."""
    if isinstance(slots, Scaled):
        data, parts, scales = slots.codes, slots.parts, slots.scales
        scale_place = (scales.data_ptr(), *scales.stride()[:3])
    else:
        data, parts, scale_place = slots, (slots.shape[-1],), (0, 0, 0, 0)
        rows = rows.to(slots.dtype)
    if rows.stride(2) != 1:
        rows = rows.contiguous()
    dtypes = _native_dtypes()
    extension().store(
        dtypes[rows.dtype],
        dtypes[data.dtype],
        torch.get_num_threads(),
        rows.data_ptr(),
        *rows.stride()[:2],
        rows.shape[1],
        parts[0],
        sum(parts[1:]),
        len(rows),
        writes.blocks.data_ptr(),
        writes.offsets.data_ptr(),
        data.data_ptr(),
        *data.stride()[:3],
        *scale_place,
    )


def choose_put(device: torch.device) -> Put:
    """The fastest way to write to slots of a device."""
    is_native = device.type == "cpu" and native_path().isa is not None
    return put_natively if is_native else put_by_torch


@cache
def _native_dtypes() -> dict[torch.dtype, object]:
    dtypes = extension().Dtype
    return {
        torch.float32: dtypes.f32,
        torch.bfloat16: dtypes.bf16,
        torch.float16: dtypes.f16,
        torch.int8: dtypes.i8,
        torch.float8_e4m3fn: dtypes.e4m3,
    }
