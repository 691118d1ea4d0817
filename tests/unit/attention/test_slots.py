"""Eight bits a cached element: how far from what was put, in any order of blocks, for any sizes."""

import numpy as np
import pytest
import torch

from kvspan.attention.contract import KeyIndex, written_out
from kvspan.attention.putting import Writes
from kvspan.attention.slots import PlainSlots, ScaledSlots, SlotShape, make_slots

CPU = torch.device("cpu")
SHAPE = SlotShape(num_heads=3, parts=(20, 12), block_size=4)
EIGHT_BITS = [torch.int8, torch.float8_e4m3fn]


def index(*tables: list[int]) -> KeyIndex:
    rows = tuple(range(len(tables) + 1))
    none = np.zeros(len(tables), np.int64)
    return KeyIndex(rows, tuple(torch.tensor(t, dtype=torch.int64) for t in tables), none, none)


def filled(slots: ScaledSlots | PlainSlots, num_blocks: int) -> torch.Tensor:
    """Puts a token in each slot; each head and part has a size of its own, over many magnitudes."""
    slots.allocate(num_blocks)
    rows = torch.randn(num_blocks * 4, 3, 32, generator=torch.Generator().manual_seed(6))
    sizes = 10.0 ** torch.arange(-3, 3).view(3, 2)  # [Hkv, parts]
    rows *= sizes.repeat_interleave(torch.tensor([20, 12]), dim=-1)
    place = torch.arange(num_blocks * 4)
    slots.put(rows, Writes(place // 4, place % 4))
    return rows.view(num_blocks, 4, 3, 32).transpose(1, 2)  # [N, Hkv, B, D]


@pytest.mark.parametrize("dtype", EIGHT_BITS, ids=str)
def test_an_element_is_near_what_was_put(dtype: torch.dtype) -> None:
    slots = ScaledSlots(SHAPE, dtype=dtype, seen_dtype=torch.float32, device=CPU)
    wanted = filled(slots, 5)
    got, same, there = written_out(slots.all, slots.all, index([4, 0], [2], [], [0, 3, 2]))
    assert torch.equal(got, same)
    assert got.dtype == torch.float32
    assert len(got) == 4  # each named block once; block 1 is not seen
    for table, blocks in zip(there.tables, ([4, 0], [2], [], [0, 3, 2]), strict=True):
        for part in (slice(0, 20), slice(20, 32)):
            near, exact = got[table][..., part], wanted[blocks][..., part]
            largest = exact.abs().amax(dim=-1, keepdim=True) * 1.01  # the scale is rounded too
            relative = exact.abs() / 16
            bound = largest / 254 if dtype == torch.int8 else relative + largest * 2.0**-19 * 1.01
            clipped = largest * 0.005  # a scale that was rounded down
            assert ((near - exact).abs() <= torch.maximum(bound, clipped)).all()


@pytest.mark.parametrize("dtype", EIGHT_BITS, ids=str)
def test_zeros_stay_zeros_and_no_tables_are_an_ordinary_input(dtype: torch.dtype) -> None:
    slots = ScaledSlots(SHAPE, dtype=dtype, seen_dtype=torch.bfloat16, device=CPU)
    slots.allocate(1)
    place = torch.zeros(1, dtype=torch.int64)
    slots.put(torch.zeros(1, 3, 32), Writes(place, place))
    seen, _, _ = written_out(slots.all, slots.all, index([0]))
    assert not seen[0, :, 0].any()
    assert written_out(slots.all, slots.all, index())[0].shape == (0, 3, 4, 32)


def test_the_first_part_is_written_out_once_for_keys_and_values() -> None:
    slots = ScaledSlots(SHAPE, dtype=torch.int8, seen_dtype=torch.float32, device=CPU)
    filled(slots, 3)
    keys, values, _ = written_out(slots.all, slots.all.first_part, index([2, 1]))
    assert values.data_ptr() == keys.data_ptr()
    assert torch.equal(values, keys[..., :20])


def test_wider_elements_are_seen_where_they_lie() -> None:
    slots = make_slots(SHAPE, dtype=torch.bfloat16, seen_dtype=torch.float32, device=CPU)
    assert isinstance(slots, PlainSlots)
    wanted = filled(slots, 3)
    asked = index([2, 1])
    got, _, there = written_out(slots.all, slots.all, asked)
    assert there is asked
    assert got is slots.all
    assert torch.equal(got, wanted.to(torch.bfloat16))
