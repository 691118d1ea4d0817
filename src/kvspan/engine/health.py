"""What a replica tells of itself, and what several tell together. Knows numbers and sentences alone."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from msgspec.structs import astuple

from kvspan.engine.events import EngineLoad, EngineStats


@dataclass(slots=True)
class Health:
    """What a replica tells of itself.

    Args:
        ready: whether it works on requests now.
        why: a sentence for when it does not.
        gone: whether it will not work again.
        restarts: times that its ranks or its process were started again.
        load: after the last step.
        stats: counters after the last step, since its process was started.
    """

    ready: bool = False
    why: str = "The engine is starting."
    gone: bool = False
    restarts: int = 0
    load: EngineLoad = field(default_factory=lambda: EngineLoad(0, 0, ()))
    stats: EngineStats = field(default_factory=EngineStats)


def together(healths: Sequence[Health]) -> Health:
    """What several replicas tell of themselves: ready if one is, gone if all are."""
    loads, stats = [h.load for h in healths], [h.stats for h in healths]
    return Health(
        ready=any(h.ready for h in healths),
        why=next((h.why for h in healths if h.why), ""),
        gone=all(h.gone for h in healths),
        restarts=sum(h.restarts for h in healths),
        load=EngineLoad(
            num_running=sum(load.num_running for load in loads),
            num_waiting=sum(load.num_waiting for load in loads),
            used_blocks=tuple(itertools.chain.from_iterable(load.used_blocks for load in loads)),
        ),
        stats=EngineStats(*map(sum, zip(*map(astuple, stats), strict=True))),
    )
