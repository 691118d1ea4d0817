"""Simulated ranks each of which is a home: a step takes as long as its busiest rank needs.

Where a request lies is read off the units that steps bring, as a worker does. Knows no scheduler.
"""

from collections.abc import Sequence

from kvspan.clock import VirtualClock
from kvspan.cost.homes import HomesCost
from kvspan.cost.latents import NEVER
from kvspan.cost.work import StepWork
from kvspan.plan.simulate import SimulatedRanks
from kvspan.step import Row, Sampled, Step, StepResult
from kvspan.worker.share import FEW_ROWS, Homes


class HomeRanks(SimulatedRanks):
    """An executor whose ranks take time and compute nothing.

    Args:
        homes: cost of their steps.
        clock: moved by each step.
    """

    def __init__(self, homes: HomesCost, clock: VirtualClock) -> None:
        super().__init__(homes.local, clock)
        self._homes, self._clock = homes, clock
        self._blocks_per_pool = 1
        self._pools: dict[int, set[int]] = {}
        self.num_steps = self.exchange_steps = 0

    def allocate_cache(self, num_blocks: int) -> None:
        """Nothing is allocated; the number says on which pool a unit lies."""
        self._blocks_per_pool = num_blocks

    def submit(self, step: Step) -> None:
        """Takes the time that a step would take."""
        for request_id in (*step.ended, *(new.request_id for new in step.new)):
            self._pools.pop(request_id, None)
        num_homes = self._homes.on.topology.dcp_size
        spread: list[Row] = []
        local: list[list[Row]] = [[] for _ in range(num_homes)]
        for row in step.rows:
            pools = self._pools.setdefault(row.request_id, set())
            pools.update(unit // self._blocks_per_pool for unit in row.new_units)
        pools_of_rows = [self._pools[row.request_id] for row in step.rows]
        homes = Homes(
            num_pools=num_homes,
            num_homes=num_homes,
            pcp_size=1,
            rule=self._homes.spread.ways.rule,
            split_tokens=NEVER,
            meet_tokens=NEVER,
            few_rows=FEW_ROWS,
        )
        for row, home in zip(step.rows, homes.of_rows(step.rows, pools_of_rows), strict=True):
            (spread if home is None else local[home]).append(row)
        self.num_steps += 1
        self.exchange_steps += any(len(pools) > 1 for pools in pools_of_rows)
        self._clock.advance(self._homes.step_s(self._work(spread), [self._work(its) for its in local]))
        sampled = tuple(Sampled(row.request_id, 0 if row.sample else None) for row in step.rows)
        self._result = StepResult(step.step_id, sampled)

    def _work(self, rows: Sequence[Row]) -> StepWork:
        return StepWork.of(
            [(row.start, row.num_tokens) for row in rows],
            num_sampled=sum(row.sample for row in rows),
            ways=self._homes.spread.ways,
        )
