"""Chrome traces: microseconds from the first span, one row a track."""

import json

from kvspan.report.chrome import Span, chrome_trace


def test_known_spans() -> None:
    tracks = {
        "engine": [Span("schedule", 10.5, 0.001, {"requests": 3})],
        "rank 0": [Span("step", 10.0, 2.0, {})],
    }
    events = json.loads(chrome_trace(tracks))["traceEvents"]
    spans = [e for e in events if e["ph"] == "X"]
    assert [(e["name"], e["tid"], e["ts"], e["dur"]) for e in spans] == [
        ("schedule", 0, 500_000.0, 1000.0),
        ("step", 1, 0.0, 2_000_000.0),
    ]
    assert spans[0]["args"] == {"requests": 3}


def test_nothing_is_a_trace_too() -> None:
    assert len(json.loads(chrome_trace({"engine": []}))["traceEvents"]) == 2
