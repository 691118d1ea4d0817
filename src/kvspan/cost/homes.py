"""How long a step takes where each rank of a DCP group is a home (`--dcp-mode elastic`, P = 1).

    projections, attention    spread rows on every rank, over its part of their keys; local rows on their
                              home alone, over all of theirs: the busiest home decides
    exchange                  spread rows alone
    everything else           all rows, shared out as tensor parallelism shares it

Each part is the one that `cost.steptime` gives; nothing is computed anew.
"""

from collections.abc import Sequence
from dataclasses import replace

from kvspan.cost.deployment import Deployment
from kvspan.cost.steptime import StepCost
from kvspan.cost.work import StepWork

NOTHING = StepWork(num_tokens=0, num_sampled=0, keys=0, pairs=0, only_decodes=True)


class HomesCost:
    """Times of steps of a deployment whose ranks are homes.

    Args:
        on: the deployment.
    """

    def __init__(self, on: Deployment) -> None:
        self.spread = StepCost(replace(on, replicate_q=True))
        self.local = StepCost(self.spread.on, ranks_are_homes=True)
        self.on = self.spread.on

    def step_s(self, spread: StepWork, local: Sequence[StepWork]) -> float:
        """Seconds of a step.

        Args:
            spread: rows of requests on several ranks.
            local: for each home, rows of requests that it has.
        """
        return sum(self.parts_s(spread, local).values())

    def parts_s(self, spread: StepWork, local: Sequence[StepWork]) -> dict[str, float]:
        """Seconds of a step by what they go to; see `step_s`."""
        whole = replace(
            NOTHING,
            num_tokens=spread.num_tokens + sum(home.num_tokens for home in local),
            num_sampled=spread.num_sampled + sum(home.num_sampled for home in local),
            only_decodes=all(work.only_decodes for work in (spread, *local)),
        )
        at_homes = [self._at_home(spread, home) for home in (*local, NOTHING)]
        busiest = max(at_homes, key=lambda parts: sum(parts.values()))
        meeting = self.spread.parts_s(spread)
        met = {name: meeting[name] for name in ("gather queries", "exchange", "gather keys")}
        return {**self.spread.parts_s(whole), **met, **busiest}

    def _at_home(self, spread: StepWork, home: StepWork) -> dict[str, float]:
        """Seconds of what a rank does for spread rows, by its part of the output, and for its own."""
        own = self._on_a_rank(NOTHING, home)
        projections = sum(
            cost.parts_s(work)["projections"]
            for cost, work in ((self.spread, spread), (self.local, own))
            if work.num_tokens
        )
        attention = self.spread.parts_s(self._on_a_rank(spread, home))["attention"]
        return {"projections": projections, "attention": attention}

    def _on_a_rank(self, spread: StepWork, home: StepWork) -> StepWork:
        """What a home attends for: a key of its own weighs what W spread ones do, which W ranks read."""
        w = self.on.topology.dcp_size
        return StepWork(
            num_tokens=spread.num_tokens + home.num_tokens,
            num_sampled=0,
            keys=spread.keys + w * home.keys,
            pairs=spread.pairs + w * home.pairs,
            expanded_tokens=spread.expanded_tokens + home.expanded_tokens,
            expanded_keys=spread.expanded_keys + w * home.expanded_keys,
            expanded_pairs=spread.expanded_pairs + w * home.expanded_pairs,
            only_decodes=spread.only_decodes and home.only_decodes,
        )
