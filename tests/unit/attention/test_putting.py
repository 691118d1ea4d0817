"""Writing rows to slots: the native way leaves the bits that torch leaves, in every dtype and shape."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvspan.attention.putting import Writes, put_by_torch, put_natively
from kvspan.attention.scaled import LIMITS, SCALE_DTYPE, Scaled
from kvspan.layout import NO_SLOT
from kvspan.native import native_path

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BLOCKS, BLOCK = 5, 8


def empty(heads: int, parts: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | Scaled:
    shape = (BLOCKS, heads, BLOCK)
    if dtype not in LIMITS:
        return torch.zeros(*shape, sum(parts), dtype=dtype)
    codes = torch.zeros(*shape, sum(parts), dtype=torch.uint8).view(dtype)
    return Scaled(codes, torch.zeros(*shape, len(parts), dtype=SCALE_DTYPE), parts, torch.float32)


def bits(slots: torch.Tensor | Scaled) -> list[torch.Tensor]:
    tensors = [slots.codes, slots.scales] if isinstance(slots, Scaled) else [slots]
    return [tensor.view(torch.uint8) for tensor in tensors]


@settings(deadline=None, max_examples=150)
@given(
    rows=st.integers(0, 40),
    heads=st.integers(1, 4),
    parts=st.lists(st.integers(1, 80), min_size=1, max_size=2).map(tuple),
    dtype=st.sampled_from(DTYPES),
    stored=st.sampled_from([*LIMITS, *DTYPES]),
    seed=st.integers(0, 999),
)
def test_both_ways_leave_the_same_bits(
    rows: int,
    heads: int,
    parts: tuple[int, ...],
    dtype: torch.dtype,
    stored: torch.dtype,
    seed: int,
) -> None:
    if native_path().isa is None:
        pytest.skip(native_path().why)
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-12, 6, (rows, heads, sum(parts)), generator=generator)
    vectors = (torch.randn(exponents.shape, generator=generator) * 2.0**exponents).to(dtype)
    vectors[: rows // 4] = 0.0
    vectors = vectors.transpose(0, 1).contiguous().transpose(0, 1)  # heads outermost in memory
    slots = torch.randperm(BLOCKS * BLOCK, generator=generator)[:rows]
    slots[torch.rand(rows, generator=generator) < 0.3] = NO_SLOT
    writes = Writes(slots // BLOCK, slots % BLOCK)
    ours, theirs = empty(heads, parts, stored), empty(heads, parts, stored)
    put_natively(ours, vectors, writes)
    put_by_torch(theirs, vectors, writes)
    assert all(map(torch.equal, bits(ours), bits(theirs)))


def test_every_number_of_16_bits_gets_the_code_that_torch_gives_it() -> None:
    if native_path().isa is None:
        pytest.skip(native_path().why)
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16)
    every = every[every.float().abs() <= 448.0]
    # Behind the largest, so that the scale is 1.
    vectors = torch.stack([torch.full_like(every, 448.0), every], dim=-1)[:, None]
    slots = torch.arange(len(every))
    writes = Writes(slots // BLOCK, slots % BLOCK)
    made = []
    for put in (put_natively, put_by_torch):
        codes = torch.zeros(-(-len(every) // BLOCK), 1, BLOCK, 2, dtype=torch.uint8)
        scales = torch.zeros(*codes.shape[:3], 1, dtype=SCALE_DTYPE)
        put(Scaled(codes.view(torch.float8_e4m3fn), scales, (2,), torch.float32), vectors, writes)
        made.append(codes)
    assert torch.equal(*made)
