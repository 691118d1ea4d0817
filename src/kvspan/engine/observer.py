"""The seam for whoever follows requests: told of each, once, when it has ended.

Knows what is told. Knows nobody who listens.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from kvspan.engine.generation import Generation
from kvspan.engine.meter import Timing
from kvspan.errors import KvspanError


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedRequest:
    """A request that has ended, in whatever way.

    Args:
        model: the name by which the engine knows its model.
        generation: what was asked, and what came of it.
        timings: of its outputs, in order of their index; seconds of one clock.
        ended_s: by that clock.
        error: what it failed with; None = it has not.
        trace_headers: of the call that it came from.
    """

    model: str
    generation: Generation
    timings: tuple[Timing, ...]
    ended_s: float
    error: KvspanError | None
    trace_headers: Mapping[str, str]


class Observer(Protocol):
    """Follows requests. It is called on the event loop, so it must be quick."""

    def ended(self, request: EndedRequest) -> None:
        """A request has ended."""
        ...
