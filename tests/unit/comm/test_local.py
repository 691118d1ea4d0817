"""Thread ranks: what they say to each other arrives, and a failure ends all of them."""

import threading

import pytest
import torch

from kvspan.comm.group import Group
from kvspan.comm.local import LocalWorld, solo
from kvspan.testing.ranks import run_ranks


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_collectives_equal_what_they_say(size: int) -> None:
    sizes = [(2 * i + 1) % 4 for i in range(size)]  # unequal, some of them 0 from three ranks on
    sizes[-1] = 0 if size > 1 else 1

    def body(world: LocalWorld) -> None:
        group: Group = world.group([range(size)])
        me = group.rank
        reduced = group.all_reduce(torch.full((2, 3), float(me))).wait()
        assert torch.equal(reduced, torch.full((2, 3), float(sum(range(size)))))

        gathered = group.all_gather(torch.full((sizes[me], 2), me), sizes).wait()
        wanted = torch.cat([torch.full((n, 2), i) for i, n in enumerate(sizes)])
        assert torch.equal(gathered, wanted)

        whole = torch.arange(sum(sizes)).float()[:, None] + me
        scattered = group.reduce_scatter(whole, sizes).wait()
        start = sum(sizes[:me])
        summed = size * torch.arange(start, start + sizes[me]).float()[:, None] + sum(range(size))
        assert torch.equal(scattered, summed)

        parts = [torch.full(((me + j) % 3,), 10 * me + j, dtype=torch.uint8) for j in range(size)]
        arrived = group.all_to_all(parts, [(i + me) % 3 for i in range(size)]).wait()
        for i, part in enumerate(arrived):
            assert torch.equal(part, torch.full(((i + me) % 3,), 10 * i + me, dtype=torch.uint8))

    run_ranks(size, body)


def test_place_in_a_group_is_place_in_its_tuple() -> None:
    partition = [(0, 2, 1, 3)]
    places = run_ranks(4, lambda world: world.group(partition).rank)
    assert places == [0, 2, 1, 3]


def test_groups_of_a_partition_do_not_hear_each_other() -> None:
    def body(world: LocalWorld) -> list[float]:
        pairs, other = world.group([(0, 1), (2, 3)]), world.group([(0, 3), (1, 2)])
        mine = torch.tensor([float(world.rank)])
        return [pairs.all_reduce(mine).wait().item(), other.all_reduce(mine).wait().item()]

    assert run_ranks(4, body) == [[1.0, 3.0], [1.0, 3.0], [5.0, 3.0], [5.0, 3.0]]


def test_a_rank_that_fails_frees_those_that_wait() -> None:
    def body(world: LocalWorld) -> None:
        group = world.group([range(3)])
        if world.rank == 1:
            raise ValueError("rank 1 stumbled")
        group.all_reduce(torch.zeros(1)).wait()

    with pytest.raises(ValueError, match="rank 1 stumbled"):
        run_ranks(3, body)


def test_ranks_that_wait_for_ever_are_broken_up() -> None:
    def body(world: LocalWorld) -> None:
        group = world.group([range(2)])
        if world.rank == 0:
            group.all_reduce(torch.zeros(1)).wait()

    with pytest.raises(threading.BrokenBarrierError):
        run_ranks(2, body, timeout_s=0.2)


def test_a_group_of_one_gives_back_what_it_got() -> None:
    x = torch.arange(3.0)
    group: Group = solo()
    assert group.all_reduce(x).wait() is x
    assert group.all_gather(x, [3]).wait() is x
    assert group.reduce_scatter(x, [3]).wait() is x
    assert group.all_to_all([x], [3]).wait()[0] is x
