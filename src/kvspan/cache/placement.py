"""Where the next units of a request go: on which pools. Pure; knows no keys and no requests.

The merge of partial results is exact for any placement, so placement is policy, and can change in
mid-life of a request without moving anything:

    spread      round the pools, so that every rank has its share of every request
    elastic     a short request stays on one home, the pools of which one coordinate (or one rank) owns;
                past a threshold, or when its home is full, its further units are spread
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(slots=True)
class Placed:
    """What of a request lies where already.

    Args:
        num_units: units so far.
        pools: pools that have any of them.
        last: pool of the last one; None = there is none.
    """

    num_units: int = 0
    pools: set[int] = field(default_factory=set)
    last: int | None = None

    def add(self, pools: Sequence[int]) -> None:
        """Takes in where further units have been placed, in order."""
        if pools:
            self.num_units += len(pools)
            self.pools.update(pools)
            self.last = pools[-1]


class Placement(Protocol):
    """Decides on which pools the next units of a request are placed."""

    def __call__(self, num_free: Sequence[int], *, num_units: int, placed: Placed) -> list[int]:
        """Pools of the next units, in order.

        Args:
            num_free: free units of each pool; together at least `num_units`.
            num_units: units to place.
            placed: what of the request lies where already.
        """
        ...


def home_of(pools: Collection[int], *, num_pools: int, num_homes: int) -> int | None:
    """The home that has all keys of a request.

    Args:
        pools: that have any of its units.
        num_pools: of the DCP group; pool `i` is of home `i % num_homes`.
        num_homes: into which the group is divided; 1 = it is not.

    Returns:
        None where several have some, where all have all of them (W = 1), and where there is one anyway.
    """
    homes = {pool % num_homes for pool in pools}
    return homes.pop() if len(homes) == 1 and min(num_pools, num_homes) > 1 else None


def round_robin(num_free: Sequence[int], *, num_units: int, placed: Placed) -> list[int]:
    """Goes round the pools from the one with most free units; a full pool is passed over.

    The start spreads short requests, which would otherwise all lie on pool 0.

    Args:
        num_free: free units of each pool; together at least `num_units`.
        num_units: units to place.
        placed: what of the request lies where already.

    Returns:
        The pool of each unit.
    """
    assert num_units <= sum(num_free), "more units than there are"
    left = list(num_free)
    turn = left.index(max(left)) if placed.last is None else (placed.last + 1) % len(left)
    pools: list[int] = []
    while len(pools) < num_units:
        if left[turn]:
            left[turn] -= 1
            pools.append(turn)
        turn = (turn + 1) % len(left)
    return pools


@dataclass(frozen=True, slots=True, kw_only=True)
class Elastic:
    """Keeps a request on one home while it is short; see the module.

    Args:
        num_homes: pool `i` belongs to home `i % num_homes`.
        most_units: units of a request that may stay on one home.
    """

    num_homes: int
    most_units: int

    def __call__(self, num_free: Sequence[int], *, num_units: int, placed: Placed) -> list[int]:
        """See `Placement`: on the home that has the request, or on the one with most free units."""
        homes = {pool % self.num_homes for pool in placed.pools} or set(range(self.num_homes))
        if placed.num_units + num_units > self.most_units or (placed.pools and len(homes) > 1):
            return round_robin(num_free, num_units=num_units, placed=placed)
        room = {home: sum(num_free[home :: self.num_homes]) for home in homes}
        home = max(room, key=lambda h: (room[h], -h))
        if room[home] < num_units:  # spread early: better than to preempt anybody
            return round_robin(num_free, num_units=num_units, placed=placed)
        at_home = [n if pool % self.num_homes == home else 0 for pool, n in enumerate(num_free)]
        return round_robin(at_home, num_units=num_units, placed=placed)
