"""The headline experiment's own arithmetic: what its budgets hold, and what its page says."""

from pathlib import Path

import pytest
from benchmarks.headline import (
    EXPERIMENTS,
    MODEL_LEN,
    RANKS,
    Experiment,
    make_trace,
    report,
    verdict,
    write_page,
)

from kvspan.bench.figures import figures
from kvspan.bench.record import Observed, Record, Sample
from kvspan.bench.sweep import Point
from kvspan.config.model import parse_model_config
from kvspan.cost.memory import kv_bytes_per_local_token
from kvspan.topology import Topology


@pytest.mark.parametrize("experiment", EXPERIMENTS, ids=lambda e: e.name)
def test_budgets_hold_eight_average_requests_and_the_longest_one(experiment: Experiment) -> None:
    model = parse_model_config(experiment.config, where=experiment.name)
    topology = Topology(tp_size=RANKS, dcp_size=1, pcp_size=1)
    local = kv_bytes_per_local_token(model, topology, kv_dtype_bytes=2)
    tokens = experiment.budget_mib * 2**20 / local
    lengths = [row.input_length + row.output_length for row in make_trace(0).rows]
    assert tokens >= 8 * sum(lengths) / len(lengths)
    assert tokens / 2 >= MODEL_LEN >= max(lengths)


def point(
    layout: str, users: int, *, running: int, tokens: int, rate: int, preemptions: int = 0
) -> Point:
    record = Record(
        index=0, input_tokens=10, due_s=0.0, sent_s=0.0, arrivals_s=[0.1, 0.2], piece_tokens=[1, rate]
    )
    sample = Sample(start_s=0.0, lasts_s=1.0, running=running, kv_used=0.5)
    run = Observed(records=[record], samples=[sample], preemptions=preemptions, end_s=1.0)
    return Point(
        key="",
        layout=layout,
        users=users,
        num_ranks=RANKS,
        budget_bytes=1,
        capacity_tokens=tokens,
        found=figures(run, num_ranks=RANKS),
    )


POINTS = [
    point("-tp 4 -dcp 1", 8, running=8, tokens=1000, rate=100),
    point("-tp 4 -dcp 1", 32, running=10, tokens=1000, rate=120),
    point("-tp 4 -dcp 1", 64, running=11, tokens=1000, rate=110, preemptions=3),
    point("-tp 4 -dcp 4", 8, running=8, tokens=4000, rate=100),
    point("-tp 4 -dcp 4", 32, running=32, tokens=4000, rate=300),
    point("-tp 4 -dcp 4", 64, running=40, tokens=4000, rate=362),
]


def test_the_verdict_compares_the_best_of_both() -> None:
    rows = {row[0]: row[1:] for row in verdict(EXPERIMENTS[0], POINTS).rows}
    assert rows["KV tokens"] == ("1,000.0", "4,000.0", "4.00", "at least 3.9")
    assert rows["requests running"] == ("10.0", "40.0", "4.00", "at least 3.8")
    assert rows["output tok/s per rank"][2:] == ("3.00", "at least 2.5")
    assert [name for name in rows if name.startswith("TPOT")] == []


def test_the_page_holds_both(tmp_path: Path) -> None:
    write_page(report(EXPERIMENTS[0], {1.0: POINTS, 0.5: POINTS}, tmp_path), tmp_path)
    text = (tmp_path / "headline.md").read_text()
    assert "| KV tokens | 1,000.0 | 4,000.0 | 4.00 | at least 3.9 |" in text
    assert "at 0.5 times the budget" in text
    assert (tmp_path / "headline.html").read_text().count("<svg") == 10
    assert (tmp_path / "mla-1-pareto.svg").exists()
