"""The native kernels on every instruction set there is: random shapes, long contexts, threads."""

import math
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvspan.attention.backends.cpu import NativeKernel
from kvspan.attention.backends.reference import ReferenceKernel
from kvspan.attention.contract import Cached, KeyIndex
from kvspan.attention.merge import merge_shards
from kvspan.attention.scaled import LIMITS, Scaled
from kvspan.config.environment import CPU_ISA, CPU_ISAS
from kvspan.native import NativePath, native_path
from kvspan.testing.cases import DTYPES, AttentionCase, SequenceRows, attention_cases, coded_cases
from kvspan.testing.tolerance import assert_within

Inputs = tuple[torch.Tensor, Cached, Cached, KeyIndex, float]
Partial = tuple[torch.Tensor, torch.Tensor]
WITHOUT = NativePath(None, "the native extension cannot be imported (it was not built)")


def kernel_of(isa: str) -> NativeKernel:
    native = pytest.importorskip("kvspan._native")
    if not native.available(native.Isa[isa]):
        pytest.skip(f"this build or processor has no {isa}")
    return NativeKernel(NativePath(isa, "the test asks for it"))


@pytest.fixture(params=CPU_ISAS)
def kernel(request: pytest.FixtureRequest) -> NativeKernel:
    return kernel_of(request.param)


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def assert_right(kernel: NativeKernel, case: AttentionCase) -> None:
    """Compares with the reference; the LSE as exactly as in float32 for every dtype."""
    out, lse = kernel(*case.inputs())
    wanted, wanted_lse = ReferenceKernel()(*exact_inputs(case))
    assert_within(out, wanted, "attention", case.dtype)
    assert_within(lse, wanted_lse, "lse", torch.float32)


def exact_inputs(case: AttentionCase) -> Inputs:
    """The same inputs, the scales of codes multiplied in float64."""
    query, keys, values, index, scale = case.inputs()
    if not isinstance(keys, Scaled) or not isinstance(values, Scaled):
        return query, keys, values, index, scale
    wide = torch.float64
    return query.to(wide), replace(keys, dtype=wide), replace(values, dtype=wide), index, scale


@pytest.mark.parametrize("case", [*attention_cases(), *coded_cases()], ids=str)
def test_every_instruction_set_equals_the_reference(kernel: NativeKernel, case: AttentionCase) -> None:
    assert_right(kernel, case)


@st.composite
def rows_of_a_sequence(draw: st.DrawFn) -> SequenceRows:
    bounds = st.integers(0, 300)
    last = draw(st.lists(bounds, min_size=0, max_size=7))
    first = [draw(st.integers(0, x)) if draw(st.booleans()) else 0 for x in last]
    return SequenceRows(tuple(first), tuple(last))


@st.composite
def cases(draw: st.DrawFn) -> AttentionCase:
    head_dim = 8 * draw(st.integers(1, 20))
    narrower = st.integers(1, head_dim // 8).map(lambda n: 8 * n)
    kv_heads = draw(st.integers(1, 3))
    return AttentionCase(
        name="random",
        heads=(kv_heads * draw(st.integers(1, 20)), kv_heads),
        head_dim=head_dim,
        value_dim=(value_dim := draw(st.none() | narrower)),
        latent=value_dim is not None,
        block_size=8 * draw(st.integers(1, 5)),
        dtype=draw(st.sampled_from(DTYPES)),
        codes=draw(st.sampled_from([None, *LIMITS])),
        sequences=tuple(draw(st.lists(rows_of_a_sequence(), max_size=4))),
        seed=draw(st.integers(0, 99)),
    )


@pytest.mark.parametrize("isa", CPU_ISAS)
@settings(deadline=None, max_examples=60)
@given(case=cases())
def test_random_shapes_equal_the_reference(isa: str, case: AttentionCase) -> None:
    assert_right(kernel_of(isa), case)


@st.composite
def many_rows(draw: st.DrawFn) -> SequenceRows:
    """Of a prompt, or each with a window of its own."""
    num_rows, context = draw(st.integers(8, 40)), draw(st.integers(0, 150))
    last = [context + 1 + i for i in range(num_rows)]
    if draw(st.booleans()):
        return SequenceRows((0,) * num_rows, tuple(last))
    first = [draw(st.integers(0, x)) for x in last]
    return SequenceRows(tuple(first), tuple(draw(st.integers(x, x + 70)) for x in first))


@pytest.mark.parametrize("isa", CPU_ISAS)
@settings(deadline=None, max_examples=60)
@given(case=cases(), sequences=st.lists(many_rows(), min_size=1, max_size=2))
def test_many_rows_equal_the_reference(
    isa: str, case: AttentionCase, sequences: list[SequenceRows]
) -> None:
    plain = replace(case, name="many", codes=None, sequences=tuple(sequences))
    assert_right(kernel_of(isa), plain)


def decode_case(*lens: int, dtype: torch.dtype = torch.bfloat16) -> AttentionCase:
    return AttentionCase(
        name="decode",
        heads=(6, 2),
        head_dim=64,
        block_size=16,
        dtype=dtype,
        sequences=tuple(SequenceRows((0,), (n,)) for n in lens),
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("codes", [None, *LIMITS], ids=str)
def test_keys_split_over_threads_are_merged(
    kernel: NativeKernel, threads: int, dtype: torch.dtype, codes: torch.dtype | None
) -> None:
    assert_right(kernel, replace(decode_case(5000, 1, 0, 700, dtype=dtype), codes=codes))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("codes", [None, *LIMITS], ids=str)
@pytest.mark.parametrize("heads", [(2, 2), (6, 2)], ids=str)
@pytest.mark.parametrize("value_dim", [64, 128, 192])
def test_chunks_of_more_rows_than_a_unit_has_lanes(
    kernel: NativeKernel,
    heads: tuple[int, int],
    value_dim: int,
    dtype: torch.dtype,
    codes: torch.dtype | None,
) -> None:
    """Several units of rows, the last one not full."""
    rows = SequenceRows((0,) * 450, tuple(range(31, 481)))
    case = decode_case(dtype=dtype)
    sizes = {"heads": heads, "head_dim": 192, "value_dim": value_dim, "latent": True}
    assert_right(kernel, replace(case, name="chunk", sequences=(rows,), codes=codes, **sizes))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("codes", LIMITS, ids=str)
def test_every_code_is_read_as_torch_reads_it(
    kernel: NativeKernel, dtype: torch.dtype, codes: torch.dtype
) -> None:
    """One key a row, so that its output is the value: every code but those that are no number."""
    value = torch.arange(256).to(torch.uint8).view(codes)
    value = value[value.float().isfinite() & (value.float() >= -LIMITS[codes])]
    value = torch.cat([value, value[: -len(value) % 8]])
    scales = torch.ones(1, 1, 8, 1, dtype=torch.bfloat16)
    cached = Scaled(value.repeat(8, 1)[None, None], scales, (len(value),), dtype)
    index = KeyIndex((0, 1), (torch.tensor([0]),), np.array([3]), np.array([4]))
    out, _ = kernel(torch.zeros(1, 1, len(value), dtype=dtype), cached, cached, index, 1.0)
    assert torch.equal(out[0, 0], value.to(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("lanes", [1, 3, 4, 8, 16])
def test_weights_of_one_tile_may_be_far_apart(
    kernel: NativeKernel, dtype: torch.dtype, lanes: int
) -> None:
    """One key outweighs 63 of an int8's lowest number; its own values are a thousandth of theirs."""
    codes = torch.full((1, 1, 64, 64), -127, dtype=torch.int8)
    codes[..., 0, :] = 127
    scales = torch.ones(1, 1, 64, 1, dtype=torch.bfloat16)
    keys = Scaled(codes, scales / 128, (64,), dtype)
    value_scales = torch.where(torch.arange(64)[:, None] > 0, scales, scales / 1024)
    values = Scaled(torch.where(codes < 0, -128, codes), value_scales, (64,), dtype)
    index = KeyIndex((0, 1), (torch.tensor([0]),), np.array([0]), np.array([64]))
    query = torch.full((1, lanes, 64), 0.5, dtype=dtype)
    wanted, wanted_lse = ReferenceKernel()(query, keys, values, index, 1 / 12)
    out, lse = kernel(query, keys, values, index, 1 / 12)
    torch.testing.assert_close(out, wanted, atol=0.0, rtol=2e-2 if dtype == torch.bfloat16 else 2e-3)
    assert_within(lse, wanted_lse, "lse", torch.float32)


@pytest.mark.parametrize("times", [1, 12])
def test_no_unseen_slot_between_windows_is_read(kernel: NativeKernel, times: int) -> None:
    rows = SequenceRows((0, 150, 158) * times, (2, 151, 160) * times)
    case = replace(decode_case(), sequences=(rows,))
    query, keys, values, index, scale = case.inputs()
    wanted = ReferenceKernel()(query, keys, values, index, scale)
    seen = {0, 1, 150, 158, 159}
    for token in set(range(160)) - seen:
        place = (index.tables[0][token // 16], slice(None), token % 16)
        keys[place] = values[place] = torch.nan
    out, lse = kernel(query, keys, values, index, scale)
    assert_within(out, wanted[0], "attention", case.dtype)
    assert_within(lse, wanted[1], "lse", torch.float32)


def assert_spoilt(kernel: NativeKernel, before: Partial, inputs: Inputs, touched: torch.Tensor) -> None:
    """What is NaN for the reference is NaN, and nothing changes but in the rows and heads `touched`."""
    out, lse = kernel(*inputs)
    wanted, wanted_lse = ReferenceKernel()(*inputs)
    bad = wanted.isnan().all(-1)
    assert torch.equal(out.isnan(), bad[..., None].expand_as(out))
    assert torch.equal(lse == torch.finfo(torch.float32).max, bad)
    assert torch.equal(lse[bad], wanted_lse[bad])
    assert all(torch.equal(a[~touched], b[~touched]) for a, b in zip(before, (out, lse), strict=True))


@pytest.mark.parametrize("value", [torch.nan, torch.inf], ids=str)
@pytest.mark.parametrize("case", [*attention_cases(), *coded_cases()][::4], ids=str)
def test_a_query_that_is_not_a_number_spoils_its_row_alone(
    kernel: NativeKernel, case: AttentionCase, value: float
) -> None:
    query, keys, values, index, scale = case.inputs()
    sees = torch.from_numpy(index.last > index.first)
    if not sees.any():
        pytest.skip("no row sees a key")
    before = kernel(query, keys, values, index, scale)
    row, head, dim = int(sees.nonzero()[-1]), query.shape[1] - 1, query.shape[2] // 2
    query[row, head, dim] = value
    touched = torch.zeros(query.shape[:2], dtype=torch.bool)
    touched[row, head] = True
    assert_spoilt(kernel, before, (query, keys, values, index, scale), touched)


@pytest.mark.parametrize("case", [*attention_cases()][::4], ids=str)
def test_a_key_that_is_not_a_number_spoils_the_rows_that_see_it(
    kernel: NativeKernel, case: AttentionCase
) -> None:
    query, keys, values, index, scale = case.inputs()
    seen = [(rows, table) for rows, table in index.sequences() if index.last[rows].max(initial=0) > 0]
    if not seen:
        pytest.skip("no row sees a key")
    before = kernel(query, keys, values, index, scale)
    rows, table = seen[-1]
    token = int(index.last[rows].max()) - 1
    assert isinstance(keys, torch.Tensor)
    keys[table[token // keys.shape[2]], 0, token % keys.shape[2], -1] = torch.nan  # of no value
    touched = torch.zeros(query.shape[:2], dtype=torch.bool)
    touched[rows, : query.shape[1] // keys.shape[1]] = torch.from_numpy(index.last[rows] > token)[
        :, None
    ]
    assert_spoilt(kernel, before, (query, keys, values, index, scale), touched)


@pytest.mark.parametrize("codes", [None, *LIMITS], ids=str)
@pytest.mark.parametrize("num_rows", [1, 24])
def test_long_contexts_over_threads_keep_what_is_not_a_number(
    kernel: NativeKernel, threads: int, codes: torch.dtype | None, num_rows: int
) -> None:
    last = tuple(range(2000 - num_rows, 2000))
    rows = SequenceRows((0,) * num_rows, last)
    case = replace(decode_case(), heads=(12, 2), codes=codes, sequences=(rows,))
    query, keys, values, index, scale = case.inputs()
    before = kernel(query, keys, values, index, scale)
    query[0, 7, 3] = torch.nan
    touched = torch.zeros(query.shape[:2], dtype=torch.bool)
    touched[0, 7] = True
    assert_spoilt(kernel, before, (query, keys, values, index, scale), touched)


def test_shards_that_are_not_numbers_are_not_lost_when_they_are_merged(kernel: NativeKernel) -> None:
    query, keys, values, index, scale = decode_case(100).inputs()
    well = kernel(query, keys, values, index, scale)
    query[0, 1, 3] = torch.nan
    ill = kernel(query, keys, values, index, scale)
    for shards in ((ill, ill), (ill, well), (well, ill)):
        out, _ = merge_shards(*(torch.stack(parts) for parts in zip(*shards, strict=True)))
        assert out.isnan().all(-1).nonzero().tolist() == [[0, 1]]


def test_queries_and_caches_need_not_be_contiguous(kernel: NativeKernel) -> None:
    query, keys, values, index, scale = decode_case(100, 30).inputs()
    wanted = kernel(query, keys, values, index, scale)
    wide = torch.cat([query, query], dim=-1)[..., : query.shape[-1]]
    both = torch.stack([keys, values], dim=3)  # keys and values of a slot side by side
    got = kernel(wide, both[:, :, :, 0], both[:, :, :, 1], index, scale)
    reversed_dims = kernel(query.flip(-1).flip(-1).mT.contiguous().mT, keys, values, index, scale)
    assert all(map(torch.equal, got, wanted))
    assert all(map(torch.equal, reversed_dims, wanted))


def test_scores_far_apart_neither_overflow_nor_vanish(kernel: NativeKernel) -> None:
    query, keys, values, index, _ = decode_case(300, dtype=torch.float32).inputs()
    out, lse = kernel(query, keys, values, index, 200.0)
    wanted, wanted_lse = ReferenceKernel()(query, keys, values, index, 200.0)
    torch.testing.assert_close(lse, wanted_lse, rtol=1e-6, atol=0.0)
    torch.testing.assert_close(out, wanted, rtol=0.0, atol=2e-3)  # scores of 1,000s: exp of their ulps


@pytest.mark.parametrize("codes", LIMITS, ids=str)
@pytest.mark.parametrize("lanes", [1, 2, 3, 4, 5, 8, 11, 16])
def test_no_element_of_a_query_is_lost_beside_a_large_one(
    kernel: NativeKernel, codes: torch.dtype, lanes: int
) -> None:
    """A query's first element is 1,000 times the others, where keys have nothing."""
    case = replace(decode_case(300, 41), heads=(2 * lanes, 2))
    query, keys, values, index, scale = case.inputs()
    assert isinstance(keys, torch.Tensor)
    assert isinstance(values, torch.Tensor)
    query[..., 0], keys[..., 0] = 1000.0, 0.0
    cached = [Scaled.of(x, (64,), codes=codes) for x in (keys, values)]
    exact = [replace(x, dtype=torch.float64) for x in cached]
    out, lse = kernel(query, *cached, index, scale)
    wanted, wanted_lse = ReferenceKernel()(query.double(), *exact, index, scale)
    assert_within(out, wanted, "attention", case.dtype)
    assert_within(lse, wanted_lse, "lse", torch.float32)


@pytest.mark.parametrize("codes", LIMITS, ids=str)
@pytest.mark.parametrize("lanes", [1, 2, 3, 4, 5, 8, 11, 16])
def test_scores_of_codes_far_apart_neither_overflow_nor_vanish(
    kernel: NativeKernel, codes: torch.dtype, lanes: int
) -> None:
    case = replace(decode_case(300, 41), heads=(2 * lanes, 2), codes=codes)
    query, keys, values, index, _ = case.inputs()
    exact = [replace(x, dtype=torch.float64) for x in (keys, values) if isinstance(x, Scaled)]
    out, lse = kernel(query, keys, values, index, 200.0)
    wanted, wanted_lse = ReferenceKernel()(query.double(), *exact, index, 200.0)
    torch.testing.assert_close(lse.double(), wanted_lse.double(), rtol=1e-6, atol=0.0)
    torch.testing.assert_close(out.double(), wanted, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("codes", LIMITS, ids=str)
@pytest.mark.parametrize("heads", [1, 2, 4, 5, 8, 16])
def test_values_far_apart_do_not_blur_one_another(
    kernel: NativeKernel, codes: torch.dtype, heads: int
) -> None:
    """The key that has nearly all weight has small values, and a row does not see the largest ones."""
    generator = torch.Generator().manual_seed(5)
    keys, values = torch.randn(2, 1, 1, 64, 64, generator=generator)
    keys[..., 0] = 0.0
    keys[..., 0, 0] = 1.0  # to the first key, by far the most
    values[..., 0, :] *= 1e-4
    values[..., 40:, :] *= 1e3
    query = torch.zeros(2, heads, 64).bfloat16()
    query[..., 0] = 11.0
    cached = [Scaled.of(x.bfloat16(), (64,), codes=codes) for x in (keys, values)]
    exact = [replace(x, dtype=torch.float64) for x in cached]
    index = KeyIndex((0, 2), (torch.tensor([0]),), np.array([0, 0]), np.array([40, 64]))
    out, lse = kernel(query, *cached, index, 1.0)
    wanted, wanted_lse = ReferenceKernel()(query.double(), *exact, index, 1.0)
    for row in range(2):
        assert (out[row].double() - wanted[row]).norm() < 5e-3 * wanted[row].norm()
    assert_within(lse, wanted_lse, "lse", torch.float32)


@pytest.mark.parametrize("codes", LIMITS, ids=str)
@pytest.mark.parametrize("heads", [1, 2, 4, 5, 8, 16])
def test_a_query_that_overflowed_does_not_pass_for_one_that_sees_nothing(
    kernel: NativeKernel, codes: torch.dtype, heads: int
) -> None:
    case = replace(decode_case(100), heads=(heads, 1), codes=codes)
    query, keys, values, index, scale = case.inputs()
    query[..., 3] = torch.inf
    out, _ = kernel(query, keys, values, index, scale)
    assert not out.isfinite().any()


def test_ranks_that_are_threads_may_call_at_once(kernel: NativeKernel, threads: int) -> None:
    given_cases = [replace(decode_case(3000 + 100 * i, 50), seed=i) for i in range(4)]
    inputs = [case.inputs() for case in given_cases]
    wanted = [kernel(*x) for x in inputs]

    def rank(i: int) -> bool:
        torch.set_num_threads(threads)
        return all(all(map(torch.equal, kernel(*inputs[i]), wanted[i])) for _ in range(20))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(rank, range(4)))


@pytest.mark.slow
@pytest.mark.parametrize("num_rows", [1, 12])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_long_context_equals_float64(
    kernel: NativeKernel, threads: int, dtype: torch.dtype, num_rows: int
) -> None:
    rows = SequenceRows((0,) * num_rows, (131_072,) * num_rows)
    case = replace(decode_case(dtype=dtype), heads=(4, 2), sequences=(rows,))
    query, keys, values, index, scale = case.inputs()
    out, lse = kernel(query, keys, values, index, scale)
    wanted, wanted_lse = ReferenceKernel()(query.double(), keys.double(), values.double(), index, scale)
    assert_within(out, wanted, "attention", dtype)
    torch.testing.assert_close(lse, wanted_lse.float(), atol=2e-5, rtol=0.0)  # a sum does not drift


@pytest.mark.parametrize("codes", [None, *LIMITS], ids=str)
def test_sums_of_many_heads_do_not_drift_over_many_tiles(
    kernel: NativeKernel, codes: torch.dtype | None
) -> None:
    """256 tiles: what steady sums are multiplied by between them is 1, and not nearly so."""
    rows = SequenceRows((0,), (16_384,))
    case = replace(decode_case(), heads=(16, 2), sequences=(rows,), codes=codes)
    query, keys, values, index, scale = case.inputs()
    exact = [
        replace(x, dtype=torch.float64) if isinstance(x, Scaled) else x.double() for x in (keys, values)
    ]
    _, lse = kernel(query, keys, values, index, scale)
    _, wanted = ReferenceKernel()(query.double(), *exact, index, scale)
    assert_within(lse, wanted, "lse", torch.float32)


def test_flat_tables_are_made_once() -> None:
    index = decode_case(20, 5).inputs()[3]
    assert index.flat is index.flat
    assert index.flat.table_starts.tolist() == [0, 2, 3]
    assert index.flat.blocks.tolist() == torch.cat(index.tables).tolist()
    assert index.flat.first.dtype == index.flat.blocks.dtype == torch.int64


def test_without_the_extension_the_kernel_refuses_with_the_reason() -> None:
    case = decode_case(5)
    assert NativeKernel(WITHOUT).capabilities.refuse(case.need) == WITHOUT.why


def test_a_process_without_the_extension_says_so_once_and_uses_torch() -> None:
    code = (
        "import sys; sys.modules['kvspan._native'] = None\n"
        "from kvspan.cli.main import main\n"
        "sys.exit(main(['doctor']))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert run.stderr.count("cannot be imported") == 1
    assert "attention, bfloat16         FusedKernel; not NativeKernel" in run.stdout


def test_dims_that_are_no_multiple_of_eight_are_refused() -> None:
    refused = kernel_of("portable").capabilities.refuse(replace(decode_case(5), head_dim=20).need)
    assert refused == "head dim 20 (wants multiples of 8)"


@pytest.mark.parametrize(
    ("asked", "said"),
    [("portable", "portable because KVSPAN_CPU_ISA asks for it"), ("mmx", "is not one of")],
)
def test_the_environment_forces_a_path(asked: str, said: str) -> None:
    code = (
        "from kvspan.native import native_path\n"
        "path = native_path()\n"
        "print(path.isa, 'because', path.why)"
    )
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, CPU_ISA: asked},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert said in run.stdout + run.stderr


def test_the_best_path_is_the_widest_there_is() -> None:
    path = native_path()
    assert path.isa in CPU_ISAS
    assert path.why


def test_a_row_without_keys_is_zero_and_minus_infinity(kernel: NativeKernel) -> None:
    out, lse = kernel(*decode_case(0).inputs())
    assert not out.any()
    assert (lse == -math.inf).all()
