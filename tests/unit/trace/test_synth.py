"""Made-up traces have the statistics that their profile promises, at any seed, length and scale."""

from collections import defaultdict
from itertools import pairwise

import numpy as np
import pytest

from kvspan.errors import ConfigError
from kvspan.trace.cut import scaled
from kvspan.trace.row import Trace, num_blocks
from kvspan.trace.stats import K, trace_stats
from kvspan.trace.synth import PROFILES, synthesize

AGENTIC = PROFILES["agentic"]


@pytest.fixture(scope="module", params=[(0, 1000), (1, 1000), (2, 3000)], ids=str)
def trace(request: pytest.FixtureRequest) -> Trace:
    seed, num_rows = request.param
    return synthesize(AGENTIC, num_rows=num_rows, rate_per_s=2.0, seed=seed)


def test_input_lengths_are_those_published(trace: Trace) -> None:
    inputs = np.array([row.input_length for row in trace.rows])
    assert np.median(inputs) == pytest.approx(67 * K, rel=0.02)
    assert (inputs > 64 * K).mean() == pytest.approx(0.53, abs=0.01)
    assert (inputs < 8 * K).mean() == pytest.approx(0.18, abs=0.01)
    assert (inputs > 128 * K).mean() == pytest.approx(0.08, abs=0.005)
    assert 0.03 <= (inputs > 256 * K).mean() <= 0.04
    assert 900 * K < inputs.max() <= 1024 * K


def test_outputs_are_about_400(trace: Trace) -> None:
    outputs = np.array([row.output_length for row in trace.rows])
    assert outputs.mean() == pytest.approx(400, rel=0.06)
    assert outputs.min() >= 1


def test_rows_come_at_the_rate_that_was_asked(trace: Trace) -> None:
    times = np.array([row.timestamp_ms for row in trace.rows])
    assert (np.diff(times) >= 0).all()
    assert trace_stats(trace).requests_per_s == pytest.approx(2.0, rel=0.05)


def test_every_block_has_an_id_and_ids_count_up(trace: Trace) -> None:
    seen: set[int] = set()
    for row in trace.rows:
        assert len(row.hash_ids) == num_blocks(row.input_length, trace.block_tokens)
        fresh = [i for i in row.hash_ids if i not in seen]
        assert fresh == list(range(len(seen), len(seen) + len(fresh)))
        seen.update(fresh)


def test_turns_extend_their_own_prefix(trace: Trace) -> None:
    sessions = defaultdict(list)
    for row in trace.rows:
        whole = row.hash_ids[: row.input_length // trace.block_tokens]
        if len(whole) > AGENTIC.shared_blocks:
            sessions[whole[AGENTIC.shared_blocks]].append((row, whole))
    turns = [pair for rows in sessions.values() for pair in pairwise(rows)]
    assert len(turns) > 0.7 * len(trace.rows)
    for (before, old), (after, new) in turns:
        assert new[: len(old)] == old
        assert after.input_length > before.input_length + before.output_length - 1
    assert trace_stats(trace, hit_unit=16).ideal_hit_rate > 0.8


@pytest.mark.parametrize("num_rows", [1, 2, 7, 60])
def test_short_traces_are_traces_too(num_rows: int) -> None:
    trace = synthesize(AGENTIC, num_rows=num_rows)
    assert len(trace.rows) == num_rows
    assert max(row.timestamp_ms for row in trace.rows) <= 1000 * num_rows


def test_a_seed_fixes_the_trace() -> None:
    assert synthesize(AGENTIC, num_rows=50, seed=4) == synthesize(AGENTIC, num_rows=50, seed=4)
    assert synthesize(AGENTIC, num_rows=50, seed=4) != synthesize(AGENTIC, num_rows=50, seed=5)


@pytest.mark.parametrize("scale", [2, 64, 512])
def test_scaling_keeps_the_statistics(scale: int) -> None:
    whole = synthesize(AGENTIC, num_rows=1000)
    small = scaled(whole, scale=scale, output_scale=4)
    inputs = np.array([row.input_length for row in small.rows])
    assert np.median(inputs) == pytest.approx(67 * K / scale, rel=0.02)
    assert (inputs > 64 * K / scale).mean() == pytest.approx(0.53, abs=0.02)
    assert small.block_tokens == 512 // scale
    assert [row.hash_ids for row in small.rows] == [row.hash_ids for row in whole.rows]
    for row in small.rows:
        assert len(row.hash_ids) == num_blocks(row.input_length, small.block_tokens)
    assert np.mean([row.output_length for row in small.rows]) == pytest.approx(100, rel=0.06)
    reuse = trace_stats(small, hit_unit=1).ideal_hit_rate
    assert reuse == pytest.approx(trace_stats(whole).ideal_hit_rate, abs=0.02)


@pytest.mark.parametrize(
    ("arguments", "flag"),
    [
        ({"num_rows": 0}, "--rows 0"),
        ({"rate_per_s": 0.0}, "--rate 0"),
        ({"rate_per_s": np.inf}, "--rate inf"),
    ],
)
def test_what_is_no_number_of_rows_is_refused(arguments: dict[str, float], flag: str) -> None:
    with pytest.raises(ConfigError, match=flag):
        synthesize(AGENTIC, **{"num_rows": 5, **arguments})  # type: ignore[arg-type]
