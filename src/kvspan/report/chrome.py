"""Spans of time as a Chrome trace: for chrome://tracing and https://ui.perfetto.dev. Knows no engine.

The format: "Trace Event Format", events of the phases X (a span) and M (a name); times are microseconds.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec


@dataclass(frozen=True, slots=True)
class Span:
    """Something that took time.

    Args:
        name: what.
        start_s: by any clock, the same for all spans.
        lasts_s: how long.
        details: shown when it is clicked.
    """

    name: str
    start_s: float
    lasts_s: float
    details: Mapping[str, int | float | str]


def chrome_trace(tracks: Mapping[str, Sequence[Span]]) -> bytes:
    """A trace file's content, one row a track, in order; time begins with the first span.

    Args:
        tracks: name of the row -> its spans; those of one row nest, or do not overlap.
    """
    begin_s = min((span.start_s for spans in tracks.values() for span in spans), default=0.0)
    events: list[dict[str, object]] = []
    for row, (name, spans) in enumerate(tracks.items()):
        where = {"pid": 0, "tid": row}
        events.append({"ph": "M", "name": "thread_name", **where, "args": {"name": name}})
        events.append({"ph": "M", "name": "thread_sort_index", **where, "args": {"sort_index": row}})
        events += [
            {
                "ph": "X",
                "name": span.name,
                **where,
                "ts": round((span.start_s - begin_s) * 1e6, 1),
                "dur": round(span.lasts_s * 1e6, 1),
                "args": dict(span.details),
            }
            for span in spans
        ]
    return msgspec.json.encode({"displayTimeUnit": "ms", "traceEvents": events})
