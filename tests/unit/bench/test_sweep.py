"""Sweeps: which points no other beats, what is measured again, and what is not."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvspan.bench import sweep
from kvspan.bench.figures import figures
from kvspan.bench.record import Observed, Record
from kvspan.bench.sweep import Layout, Point, SweepPlan, pareto_front, read_points, run_sweep
from kvspan.bench.sweep_report import pareto_plot, sweep_csv, sweep_page, sweep_table
from kvspan.cli.main import main
from kvspan.config.engine import EngineConfig
from kvspan.errors import ConfigError
from kvspan.testing.checkpoints import write_checkpoint
from kvspan.testing.tiny import TINY
from kvspan.trace.row import Trace, TraceRow

NUMBERS = st.integers(0, 6).map(float)


@given(points=st.lists(st.tuples(NUMBERS, NUMBERS), max_size=12))
def test_the_front_is_what_no_other_point_beats(points: list[tuple[float, float]]) -> None:
    def beaten(i: int) -> bool:
        (x, y) = points[i]
        return any(
            u >= x and v >= y and ((u, v) != (x, y) or j < i)
            for j, (u, v) in enumerate(points)
            if j != i
        )

    front = pareto_front(points)
    assert sorted(front) == [i for i in range(len(points)) if not beaten(i)]
    assert [points[i] for i in front] == sorted(points[i] for i in front)


PLAN = SweepPlan(
    layouts=[
        Layout(name, EngineConfig(model="m", tensor_parallel_size=2, decode_context_parallel_size=w))
        for name, w in (("tp", 1), ("dcp", 2))
    ],
    users=[1, 2, 4],
    trace=Trace((TraceRow(0, 10, 2),)),
)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """What was measured, by a fake that needs no engine."""
    asked: list[tuple[str, int]] = []

    def measure(plan: SweepPlan, layout: Layout, users: int, key: str, told: object) -> Point:
        asked.append((layout.name, users))
        return point(layout.name, users, key=key)

    monkeypatch.setattr(sweep, "_measure", measure)
    return asked


def point(layout: str, users: int, *, key: str = "") -> Point:
    gap_s = 0.1 * users if layout == "tp" else 0.05 * users
    records = [
        Record(
            index=i,
            input_tokens=10 * 1024 * (1 + 9 * (i % 2)),
            due_s=0.0,
            sent_s=0.0,
            arrivals_s=[gap_s, 2 * gap_s],
            piece_tokens=[1, 1],
            end_s=2 * gap_s,
        )
        for i in range(4)
    ]
    found = figures(Observed(records=records, end_s=1.0), num_ranks=2)
    return Point(
        key=key,
        layout=layout,
        users=users,
        num_ranks=2,
        budget_bytes=1,
        capacity_tokens=1000,
        found=found,
    )


def test_layouts_take_turns_and_points_are_kept(measured: list[tuple[str, int]], tmp_path: Path) -> None:
    path = tmp_path / "points.jsonl"
    points = run_sweep(PLAN, path)
    assert measured == [("tp", 1), ("dcp", 1), ("dcp", 2), ("tp", 2), ("tp", 4), ("dcp", 4)]
    assert [(p.layout, p.users) for p in points] == [
        (name, n) for name in ("tp", "dcp") for n in (1, 2, 4)
    ]
    measured.clear()
    assert run_sweep(PLAN, path) == points
    assert measured == []


def test_a_sweep_goes_on_where_it_ended(measured: list[tuple[str, int]], tmp_path: Path) -> None:
    path = tmp_path / "points.jsonl"
    run_sweep(PLAN, path)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:2]) + lines[2][:40])  # the machine went off in mid-line
    measured.clear()
    assert len(run_sweep(PLAN, path)) == 6
    assert measured == [("dcp", 2), ("tp", 2), ("tp", 4), ("dcp", 4)]
    assert len(read_points(path)) == 6


def test_another_trace_or_time_is_another_point(tmp_path: Path) -> None:
    layout = PLAN.layouts[0]
    longer = SweepPlan(layouts=PLAN.layouts, users=[1], trace=PLAN.trace, duration_s=9)
    other = SweepPlan(layouts=PLAN.layouts, users=[1], trace=Trace((TraceRow(0, 11, 2),)))
    keys = {sweep.point_key(plan, layout, 1) for plan in (PLAN, longer, other)}
    assert len(keys | {sweep.point_key(PLAN, PLAN.layouts[1], 1), sweep.point_key(PLAN, layout, 2)}) == 5


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "points.jsonl").write_text("{}\n")
    with pytest.raises(ConfigError, match="holds no points"):
        read_points(tmp_path / "points.jsonl")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_points(tmp_path)


def test_reports_hold_every_point() -> None:
    points = [point(name, n) for name in ("tp", "dcp") for n in (1, 2)]
    table = sweep_table(points)
    assert [row[:2] for row in table.rows] == [("tp", "1"), ("tp", "2"), ("dcp", "1"), ("dcp", "2")]
    assert [row[-1] for row in table.rows] == ["", "", "*", ""]
    assert len(sweep_csv(points).splitlines()) == 5
    plot = pareto_plot(points)
    assert [(line.name, list(line.labels)) for line in plot.lines] == [
        ("tp", ["1", "2"]), ("dcp", ["1", "2"])
    ]  # fmt: skip
    assert plot.lines[1].x[0] == pytest.approx(20)
    page = sweep_page("Sweep", "kvspan bench sweep", points)
    assert page.count("<svg") == 1 + 4 + 2
    assert "Prompts of 64-128K" in page


def test_the_command_sweeps_a_tiny_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, trace, out = tmp_path / "model", tmp_path / "trace.jsonl", tmp_path / "out"
    model.mkdir()
    write_checkpoint(model, TINY["llama-gqa"], seed=5)
    trace.write_text('{"timestamp": 0, "input_length": 20, "output_length": 3}\n' * 4)
    small = ["--kv-cache-memory", "1MiB", "--max-model-len", "160", "--num-threads", "1"]
    arguments = ["bench", "sweep", str(model), "--trace", str(trace), "--output", str(out), *small]
    assert main([*arguments, "--concurrency", "1,2"]) == 0
    assert "-tp 1 -dcp 1" in capsys.readouterr().out
    names = ("points.jsonl", "sweep.html", "sweep.csv", "pareto.svg", "pareto.png")
    assert all((out / name).stat().st_size for name in names)
    for flags, says in (
        (["--concurrency", "x"], "--concurrency x"),
        (["--concurrency", "0"], "--concurrency 0"),
        (["--duration", "-1"], "--duration -1"),
    ):
        assert main([*arguments, *flags]) == 2
        assert says in capsys.readouterr().err
