"""Counts what an engine's steps do. Knows steps and where requests lie; decides nothing."""

from collections.abc import Collection, Mapping, Sequence

from kvspan.config.resolved import Resolved
from kvspan.engine.events import EngineStats
from kvspan.engine.travel import ContextTravel, Travelled
from kvspan.scheduler import Progress, Scheduled
from kvspan.sequence import SequenceState


class StepCounter:
    """Adds steps up, over every cache that the engine has.

    Args:
        resolved: what runs.
    """

    def __init__(self, resolved: Resolved) -> None:
        self.stats = EngineStats()
        self._travel = ContextTravel(resolved)
        self._spills_before = 0

    def begin_empty(self) -> None:
        """A new cache counts its spills from 0."""
        self._spills_before = self.stats.spills

    def travel(self, scheduled: Scheduled, states: Mapping[int, SequenceState]) -> Travelled:
        """What a step has to exchange; all that is told by the step alone, to be counted later.

        Args:
            scheduled: the step.
            states: every request.
        """
        return self._travel.of(scheduled.step.rows, lambda i: _pools(states.get(i)))

    def count(
        self,
        scheduled: Scheduled,
        travelled: Travelled,
        progress: Sequence[Progress],
        states: Mapping[int, SequenceState],
        *,
        num_spills: int,
    ) -> None:
        """Takes in a step.

        Args:
            scheduled: the step.
            travelled: what it had to exchange.
            progress: what it gave.
            states: every request, those that end with it included.
            num_spills: of the cache, since it began.
        """
        rows = scheduled.step.rows
        prefills = [row.num_tokens for row in rows if row.num_tokens > 1 or not row.sample]
        admitted = [state for i in scheduled.admitted if (state := states.get(i))]
        first = [state for state in admitted if not state.num_preemptions]
        has_met = scheduled.num_spread > 0 or travelled.num_met > 0
        old = self.stats
        self.stats = EngineStats(
            steps=old.steps + 1,
            prompt_tokens=old.prompt_tokens + sum(s.num_prompt_tokens for s in first),
            cached_tokens=old.cached_tokens + sum(s.num_cached_tokens or 0 for s in first),
            prefill_tokens=old.prefill_tokens + sum(prefills),
            output_tokens=old.output_tokens + sum(p.sampled.token_id is not None for p in progress),
            preemptions=old.preemptions + len(scheduled.preempted),
            kv_gathers=old.kv_gathers + travelled.num_keys,
            kv_gather_bytes=old.kv_gather_bytes + travelled.key_bytes,
            q_gathers=old.q_gathers + travelled.num_queries,
            q_gather_bytes=old.q_gather_bytes + travelled.query_bytes,
            exchange_steps=old.exchange_steps + has_met,
            shared_steps=old.shared_steps + (travelled.num_shared > 0),
            team_steps=old.team_steps + travelled.by_team,
            spills=self._spills_before + num_spills,
        )


def _pools(state: SequenceState | None) -> Collection[int]:
    """Those that have any of a request's units; none of one that has gone."""
    return state.allocation.placed.pools if state is not None and state.allocation else ()
