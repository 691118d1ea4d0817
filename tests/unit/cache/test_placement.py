"""Where units go: round the pools, or on one home for as long as that is short and has room."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvspan.cache.placement import Elastic, Placed, home_of, round_robin

FREE = st.lists(st.integers(0, 9), min_size=1, max_size=8)


def placed_on(*pools: int) -> Placed:
    placed = Placed()
    placed.add(pools)
    return placed


@pytest.mark.parametrize(
    ("num_free", "num_units", "before", "pools"),
    [
        ([2, 5, 3], 4, [], [1, 2, 0, 1]),
        ([5, 5, 5], 3, [], [0, 1, 2]),
        ([2, 0, 3], 4, [0], [2, 0, 2, 0]),
        ([0, 0, 3], 3, [2], [2, 2, 2]),
        ([4], 2, [], [0, 0]),
        ([1, 1], 0, [], []),
    ],
)
def test_round_robin_starts_where_there_is_most_and_passes_over_the_full(
    num_free: list[int], num_units: int, before: list[int], pools: list[int]
) -> None:
    assert round_robin(num_free, num_units=num_units, placed=placed_on(*before)) == pools


@pytest.mark.parametrize(
    ("num_free", "num_units", "before", "pools"),
    [
        ([2, 5, 3, 9], 3, [], [3, 1, 3]),  # home 1 has 14 of pools 1 and 3
        ([2, 5, 3, 9], 2, [2], [0, 2]),  # it stays on home 0, whatever the others have
        ([1, 5, 1, 9], 3, [2], [3, 0, 1]),  # home 0 is too full: spread early
        ([9, 9, 9, 9], 3, [0, 1], [2, 3, 0]),  # spread already
        ([9, 9, 9, 9], 5, [], [0, 1, 2, 3, 0]),  # over the threshold from the first token
        ([9, 9, 9, 9], 1, [0, 2, 0, 2], [3]),  # over it in mid-life: what lies at home stays there
    ],
)
def test_elastic_keeps_short_requests_at_home(
    num_free: list[int], num_units: int, before: list[int], pools: list[int]
) -> None:
    elastic = Elastic(num_homes=2, most_units=4)
    assert elastic(num_free, num_units=num_units, placed=placed_on(*before)) == pools


@given(num_free=FREE, homes=st.integers(1, 4), most=st.integers(0, 40), data=st.data())
def test_a_placement_takes_no_more_than_there_is(
    num_free: list[int], homes: int, most: int, data: st.DataObject
) -> None:
    num_units = data.draw(st.integers(0, sum(num_free)))
    before = data.draw(st.lists(st.integers(0, len(num_free) - 1), max_size=9))
    for placement in (round_robin, Elastic(num_homes=homes, most_units=most)):
        pools = placement(num_free, num_units=num_units, placed=placed_on(*before))
        assert len(pools) == num_units
        assert all(pools.count(pool) <= free for pool, free in enumerate(num_free))


@given(num_free=FREE, homes=st.integers(1, 4), most=st.integers(0, 40), data=st.data())
def test_a_short_request_stays_at_home_if_that_has_room(
    num_free: list[int], homes: int, most: int, data: st.DataObject
) -> None:
    home = data.draw(st.integers(0, homes - 1))
    owned = range(home, len(num_free), homes)
    room = sum(num_free[pool] for pool in owned)
    if not owned or not room or not most:
        return
    before = [owned[0]] * data.draw(st.integers(1, most))
    num_units = min(room, most - len(before))
    elastic = Elastic(num_homes=homes, most_units=most)
    pools = elastic(num_free, num_units=num_units, placed=placed_on(*before))
    assert all(pool in owned for pool in pools)


def test_a_request_is_at_home_where_all_its_units_are() -> None:
    assert home_of({1, 3}, num_pools=4, num_homes=2) == 1
    assert home_of({0, 1}, num_pools=4, num_homes=2) is None
    assert home_of({2}, num_pools=4, num_homes=4) == 2
    assert home_of({0}, num_pools=1, num_homes=2) is None  # W = 1, or every unit lies on all ranks
    assert home_of({3}, num_pools=4, num_homes=1) is None
    assert home_of(set(), num_pools=4, num_homes=2) is None
