"""Collectives among processes against lists added up in this one."""

from collections.abc import Sequence

import msgspec
import pytest

from kvspan.executor.children import fork_server
from kvspan.testing.toy_worker import DTYPES, Collective, Heard, Talk, contribution
from kvspan.worker.messages import Channel, Failed, decode_answer

pytestmark = pytest.mark.timeout(60)

OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


@pytest.fixture(params=["gloo", "shm"])
def comm(request: pytest.FixtureRequest) -> str:
    """Each transport of collectives between processes of a host."""
    return request.param


def talked(
    comm: str, partition: Sequence[Sequence[int]], collectives: Sequence[Collective]
) -> list[Heard]:
    """What each rank of `partition` heard, in order of world rank."""
    server, world_size = fork_server(), sum(map(len, partition))
    talk = Talk(
        comm, server.private_path(), world_size, tuple(map(tuple, partition)), tuple(collectives)
    )
    children = [
        server.fork("kvspan.testing.toy_worker:talk", rank=rank, num_threads=1)
        for rank in range(world_size)
    ]
    try:
        for child in children:
            child.channel.settimeout(40)
            Channel(child.channel).send(msgspec.msgpack.encode(talk))
        return [_heard(Channel(child.channel).receive()) for child in children]
    finally:
        for child in children:
            child.kill()
            child.close()


def _heard(body: bytes | None) -> Heard:
    assert body is not None, "the rank died"
    try:
        return msgspec.msgpack.decode(body, type=Heard)
    except msgspec.ValidationError:
        failed = decode_answer(body)
        assert isinstance(failed, Failed)
        raise AssertionError(failed.traceback) from None


def expected(collective: Collective, rank: int, size: int) -> list:
    """The naive twin: everybody's contribution as lists, put together by hand."""
    sizes = collective.sizes

    def put(who: int, rows: int) -> list[list[float]]:
        return contribution(collective, who, rows).tolist()

    def summed() -> list[list[float]]:
        every = [put(who, sum(sizes)) for who in range(size)]
        return [[sum(column) for column in zip(*rows, strict=True)] for rows in zip(*every, strict=True)]

    if collective.op == "all_reduce":
        return summed()
    if collective.op == "all_gather":
        return [row for who in range(size) for row in put(who, sizes[who])]
    if collective.op == "reduce_scatter":
        return summed()[sum(sizes[:rank]) : sum(sizes[: rank + 1])]
    arriving = [put(who, sizes[(who + rank) % size]) for who in range(size)]
    return [[number for row in rows for number in row] for rows in arriving]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_collectives_equal_naive_ones(comm: str, size: int) -> None:
    """All at once, so that any mix-up of those under way shows."""
    unequal = tuple((3 * i + 2) % 5 for i in range(size))
    some_zero = tuple(i % 2 for i in range(size))
    collectives = [
        Collective(op, dtype, sizes, width)
        for dtype in DTYPES
        for sizes in ((2,) * size, unequal, some_zero, (0,) * size)
        for width in (1, 3)
        for op in OPS
    ]
    for rank, heard in enumerate(talked(comm, [range(size)], collectives)):
        assert heard.group_rank == rank
        for collective, result in zip(collectives, heard.results, strict=True):
            assert result == expected(collective, rank, size), collective


def test_place_in_a_group_is_place_in_its_tuple(comm: str) -> None:
    """The DCP group of T=2, P=2, W=4 is not in ascending order."""
    partition = [(0, 2, 1, 3)]
    mine = Collective("all_gather", "int64", (1, 1, 1, 1))
    heard = talked(comm, partition, [mine])
    assert [h.group_rank for h in heard] == [0, 2, 1, 3]
    for h in heard:
        assert h.results == [expected(mine, h.group_rank, 4)]


def test_groups_of_a_partition_do_not_hear_each_other(comm: str) -> None:
    partition = [(3, 0), (1, 2)]
    mine = Collective("all_to_all", "float32", (1, 2))
    for h in talked(comm, partition, [mine]):
        assert h.results == [expected(mine, h.group_rank, 2)]


def test_a_rank_alone_in_its_group_stands_beside_others(comm: str) -> None:
    partition = [(1,), (2, 0)]
    mine = Collective("all_reduce", "float32", (2, 0))
    zero, one, two = talked(comm, partition, [mine])
    assert one.results == [expected(mine, 0, 1)]
    assert two.results == zero.results == [expected(mine, 0, 2)]
