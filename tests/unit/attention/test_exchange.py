"""All exchanges on thread ranks: any pieces of any partials, against a merge that was never split."""

from contextlib import nullcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvspan.attention.exchange import make_exchange
from kvspan.attention.merge import merge_shards
from kvspan.comm.group import Piece, World
from kvspan.comm.shm import refusal
from kvspan.testing.ranks import CountingGroup, run_ranks, shared_worlds
from kvspan.testing.tolerance import assert_within
from kvspan.topology import Span, cut

needs_shm = pytest.mark.skipif(refusal() is not None, reason=str(refusal()))
EXCHANGES = ["a2a", "ag_rs", pytest.param("fused", marks=needs_shm)]
"""`fused` is what `a2a` does over shared memory."""


def partials(
    size: int, rows: int, heads: int, dim: int, dtype: torch.dtype, seed: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """[W, R, H, D] and [W, R, H], about a third of the shards having seen no key.

    What they hold then must not matter where there is a merge; one rank takes its partials as they are,
    and kernels give zeros.
    """
    generator = torch.Generator().manual_seed(seed)
    out = torch.randn(size, rows, heads, dim, generator=generator)
    lse = torch.randn(size, rows, heads, generator=generator)
    empty = torch.rand(size, rows, 1, generator=generator) < 0.3
    out = out.masked_fill(empty[..., None], torch.nan if size > 1 else 0.0)
    return out.to(dtype), lse.masked_fill(empty, -torch.inf)


def exchanged(
    name: str, out: torch.Tensor, lse: torch.Tensor, pieces: list[Piece]
) -> tuple[list[torch.Tensor], list[list[str]]]:
    size = len(pieces)
    fused = name == "fused"

    def body(world: World) -> tuple[torch.Tensor, list[str]]:
        group = CountingGroup(world.group([range(size)]))
        exchange = make_exchange("a2a" if fused else name, group)
        mine = exchange.start(out[world.rank], lse[world.rank], pieces).wait()
        return mine, [call.op for call in group.calls]

    with shared_worlds(size) if fused else nullcontext() as shared:
        results = run_ranks(size, lambda world: body(shared[world.rank] if shared else world))
    return [piece for piece, _ in results], [calls for _, calls in results]


@pytest.mark.parametrize("name", EXCHANGES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 6, 8])
@pytest.mark.parametrize(("rows", "heads", "dim"), [(5, 9, 8), (1, 1, 64), (0, 3, 8), (3, 2, 12)])
def test_each_rank_ends_with_its_slice_of_the_merge(
    name: str, dtype: torch.dtype, size: int, rows: int, heads: int, dim: int
) -> None:
    out, lse = partials(size, rows, heads, dim, dtype, seed=size)
    pieces = [Piece(slice(None), cut(heads * dim, parts=size, index=i)) for i in range(size)]
    got, calls = exchanged(name, out, lse, pieces)
    wanted = merge_shards(out.float(), lse)[0].flatten(1)
    assert_within(torch.cat(got, dim=1), wanted, "attention", dtype)
    assert all(piece.dtype == dtype for piece in got)
    assert all(c == calls[0] for c in calls)
    if name == "fused":
        assert calls[0] == ["merge_scatter"]


@settings(max_examples=40, deadline=None)
@given(
    data=st.data(),
    name=st.sampled_from(["a2a", "ag_rs"] + ["fused"] * (refusal() is None)),
    size=st.integers(1, 5),
)
def test_any_rows_times_any_slice(data: st.DataObject, name: str, size: int) -> None:
    rows, heads, dim = data.draw(st.integers(0, 6)), data.draw(st.integers(1, 4)), 5
    out, lse = partials(size, rows, heads, dim, torch.float32, seed=data.draw(st.integers(0, 99)))
    pieces = []
    for _ in range(size):
        chosen = data.draw(st.lists(st.integers(0, max(rows - 1, 0)), max_size=rows, unique=True))
        a, b = sorted(data.draw(st.tuples(*[st.integers(0, heads * dim)] * 2)))
        pieces.append(Piece(torch.tensor(chosen, dtype=torch.int64), Span(a, b)))
    got, _ = exchanged(name, out, lse, pieces)
    merged = merge_shards(out, lse)[0].flatten(1)
    for piece, mine in zip(pieces, got, strict=True):
        wanted = merged[piece.rows][:, piece.columns.start : piece.columns.stop]
        assert mine.shape == wanted.shape
        assert_within(mine, wanted, "attention", torch.float32)


@needs_shm
def test_more_rows_than_a_slot_holds_and_rows_wider_than_it() -> None:
    """The first go in pieces; the second are sent and merged by the receiver, as over any transport."""
    for rows, heads, ops in ((3000, 4, "merge_scatter"), (1, 9000, "all_to_all")):
        out, lse = partials(2, rows, heads, 64, torch.bfloat16, seed=1)
        pieces = [Piece(slice(None), cut(heads * 64, parts=2, index=i)) for i in range(2)]
        got, calls = exchanged("fused", out, lse, pieces)
        wanted = merge_shards(out.float(), lse)[0].flatten(1)
        assert_within(torch.cat(got, dim=1), wanted, "attention", torch.bfloat16)
        assert calls == [[ops]] * 2
