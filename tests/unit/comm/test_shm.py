"""Ranks over shared memory beside the same ranks as threads: the same bits, at any size."""

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvspan.comm.group import Group
from kvspan.comm.rendezvous import share_file
from kvspan.comm.shm import SLOT_BYTES, ShmWorld, refusal
from kvspan.executor.children import fork_server
from kvspan.testing.ranks import run_ranks, shared_worlds
from kvspan.testing.toy_worker import Rounds
from kvspan.worker.messages import Channel

pytestmark = [
    pytest.mark.timeout(100),
    pytest.mark.skipif(refusal() is not None, reason=str(refusal())),
]

SUMMED = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64)
DTYPES = (*SUMMED, torch.uint8, torch.float8_e4m3fn)


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    before = os.listdir("/dev/shm")  # noqa: PTH208
    yield
    assert os.listdir("/dev/shm") == before  # noqa: PTH208


def beside(size: int, body: Callable[[Group, Group], None], *, timeout_s: float = 30.0) -> None:
    """Runs `body` on threads, each with its group over shared memory and its group of threads."""
    everybody = [range(size)]
    with shared_worlds(size, timeout_s=timeout_s) as shared:
        run_ranks(size, lambda w: body(shared[w.rank].group(everybody), w.group(everybody)))


def numbers(shape: Sequence[int], dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * 50).to(dtype)


def assert_same_bits(got: torch.Tensor, wanted: torch.Tensor) -> None:
    assert got.dtype == wanted.dtype
    assert got.shape == wanted.shape
    a, b = (x.contiguous().flatten().view(torch.uint8) for x in (got, wanted))
    assert torch.equal(a, b)


def compare(mine: Group, threads: Group, sizes: Sequence[int], width: int, dtype: torch.dtype) -> None:
    """All four collectives over both transports, all begun before the first is waited for."""
    rank, size = mine.rank, mine.size
    counts = [sizes[(rank + j) % size] * width for j in range(size)]
    arriving = [sizes[(i + rank) % size] * width for i in range(size)]
    parts = [numbers((n,), dtype, seed=rank * size + j) for j, n in enumerate(counts)]
    gathered = numbers((sizes[rank], width), dtype, seed=rank)
    whole = numbers((sum(sizes), width), dtype, seed=100 + rank)

    def begin(group: Group) -> list:
        begun: list = [group.all_gather(gathered, sizes), group.all_to_all(parts, arriving)]
        if dtype in SUMMED:
            begun += [group.reduce_scatter(whole, sizes), group.all_reduce(whole.clone())]
        return begun

    for got, wanted in zip(*[[p.wait() for p in begin(g)] for g in (mine, threads)], strict=True):
        pairs = zip(got, wanted, strict=True) if isinstance(got, list) else [(got, wanted)]
        for a, b in pairs:
            assert_same_bits(a, b)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", range(1, 9))
def test_the_same_bits_as_threads(size: int, dtype: torch.dtype) -> None:
    shapes = ((0,) * size, (1,) * size, (3,) * size, tuple((3 * i + 2) % 5 for i in range(size)))

    def body(mine: Group, threads: Group) -> None:
        for sizes in shapes:
            for width in (1, 33, 1000):
                compare(mine, threads, sizes, width, dtype)

    beside(size, body)


@pytest.mark.parametrize("size", [2, 3, 8])
@pytest.mark.parametrize("num_bytes", [SLOT_BYTES - 4, SLOT_BYTES, SLOT_BYTES + 4, 1 << 20])
def test_messages_longer_than_a_slot_go_in_pieces(size: int, num_bytes: int) -> None:
    """The first rank has all of it, the next half; a share of a slot is smaller than a slot."""
    sizes = [num_bytes // 4 >> i for i in range(size)]
    beside(size, lambda mine, threads: compare(mine, threads, sizes, 1, torch.float32))


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=6),
    width=st.integers(1, 20_000),
    dtype=st.sampled_from(DTYPES),
)
def test_any_sizes(sizes: list[int], width: int, dtype: torch.dtype) -> None:
    beside(len(sizes), lambda mine, threads: compare(mine, threads, sizes, width, dtype))


def test_extreme_numbers_are_rounded_as_torch_does() -> None:
    """Overflow, subnormals, halfway cases, infinities and signed zeros."""
    bits = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)

    def body(mine: Group, threads: Group) -> None:
        for dtype in (torch.float16, torch.bfloat16):
            x = bits.view(dtype)
            x = x[~x.isnan()].roll(7919 * mine.rank)
            got, wanted = (group.all_reduce(x.clone()).wait() for group in (mine, threads))
            assert torch.equal(got.isnan(), wanted.isnan())
            assert_same_bits(got[~got.isnan()], wanted[~got.isnan()])

    beside(3, body)


def test_groups_by_turns() -> None:
    """Three partitions of four ranks, with a collective of each under way at once."""
    partitions = (((0, 1, 2, 3),), ((0, 1), (2, 3)), ((3, 0), (1,), (2,)))

    def body(shared: ShmWorld) -> None:
        groups = [shared.group(p) for p in partitions]
        assert groups[0] is shared.group(partitions[0])
        for i in range(50):
            mine = torch.tensor([i * 10 + shared.rank])
            begun = [group.all_gather(mine, [1] * group.size) for group in groups]
            for pending, partition in zip(reversed(begun), reversed(partitions), strict=True):
                members = next(g for g in partition if shared.rank in g)
                assert pending.wait().tolist() == [i * 10 + member for member in members]

    with shared_worlds(4) as shared:
        run_ranks(4, lambda world: body(shared[world.rank]))


def test_ranks_that_disagree_are_told() -> None:
    def body(mine: Group, _threads: Group) -> None:
        with pytest.raises(RuntimeError, match="came with 8 bytes where 4 were agreed"):
            mine.all_to_all([torch.zeros(2)] * 2, [1, 1]).wait()

    beside(2, body)


def test_a_rank_that_does_not_come_is_named() -> None:
    def body(mine: Group, _threads: Group) -> None:
        if mine.rank != 1:
            with pytest.raises(
                TimeoutError, match=r"Rank 1 has not come to an exchange of ranks 0, 1, 2"
            ):
                mine.all_reduce(torch.zeros(1)).wait()

    beside(3, body, timeout_s=0.2)


def test_who_waits_sleeps() -> None:
    def body(mine: Group, _threads: Group) -> None:
        if mine.rank == 0:
            before_s = time.thread_time()
            with pytest.raises(TimeoutError):
                mine.all_reduce(torch.zeros(1)).wait()
            assert time.thread_time() - before_s < 0.1

    beside(2, body, timeout_s=1.0)


def test_who_sleeps_is_woken() -> None:
    """The last to come is late by more than anybody spins or yields."""

    def body(mine: Group, _threads: Group) -> None:
        late = threading.Event()
        for i in range(8):
            if mine.rank == i % mine.size:
                late.wait(0.02)
            assert mine.all_reduce(torch.ones(1)).wait().item() == mine.size

    beside(4, body)


def test_ranks_that_do_not_come_to_the_start_are_named(tmp_path: Path) -> None:
    with pytest.raises(TimeoutError, match=r"ranks \[1, 2\] have not come"):
        share_file(rank=0, size=3, path=tmp_path / "meet", timeout_s=0.1)
    with pytest.raises(TimeoutError, match="rank 0 has not come"):
        share_file(rank=1, size=3, path=tmp_path / "meet", timeout_s=0.1)
    assert not list(tmp_path.iterdir())


def test_ranks_meet_however_long_the_path_is(tmp_path: Path) -> None:
    path = tmp_path / ("long" * 50) / "meet"
    path.parent.mkdir()
    files = run_ranks(3, lambda w: share_file(rank=w.rank, size=3, path=path, timeout_s=10))
    assert len({os.fstat(file).st_ino for file in files}) == 1
    assert not path.exists()
    for file in files:
        os.close(file)


@pytest.mark.parametrize("size", [2, 5])
@pytest.mark.parametrize("count", [2_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_many_rounds(size: int, count: int) -> None:
    """Also with more ranks than this machine may have cores."""
    server = fork_server()
    payload = msgspec.msgpack.encode(Rounds("shm", server.private_path(), size, count))
    children = [
        server.fork("kvspan.testing.toy_worker:go_rounds", rank=rank, num_threads=1)
        for rank in range(size)
    ]
    try:
        for child in children:
            child.channel.settimeout(90)
            Channel(child.channel).send(payload)
        assert [msgspec.msgpack.decode(Channel(c.channel).receive() or b"") for c in children] == (
            [count] * size
        )
    finally:
        for child in children:
            child.kill()
            child.close()
