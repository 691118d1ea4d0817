"""Figures of a trace, each against an answer that can be counted by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvspan.errors import ConfigError
from kvspan.trace.row import Trace, TraceRow
from kvspan.trace.stats import Spread, known_prefixes, length_buckets, trace_stats
from kvspan.trace.tokens import TokenSource

# Blocks of 10 tokens. The second row begins with 20 tokens of the first, the third with 15 of them (its
# second block is partial), the fourth with nothing, since its first block is another.
ROWS = (
    TraceRow(0, 30, 5, (1, 2, 3)),
    TraceRow(1000, 25, 7, (1, 2, 4)),
    TraceRow(2000, 15, 9, (1, 2)),
    TraceRow(4000, 30, 11, (5, 6, 7)),
)
TRACE = Trace(ROWS, block_tokens=10)


def test_known_answers() -> None:
    stats = trace_stats(TRACE)
    assert known_prefixes(TRACE) == [0, 20, 15, 0]
    assert (stats.num_rows, stats.duration_s, stats.requests_per_s) == (4, 4.0, 1.0)
    assert (stats.total_input_tokens, stats.unique_input_tokens) == (100, 65)
    assert stats.reuse == pytest.approx(100 / 65)
    assert stats.output_tokens == Spread(mean=8.0, p50=8.0, p90=10.4, p99=10.94, max=11.0)


@pytest.mark.parametrize(("unit", "hits"), [(1, 34), (4, 32), (8, 24), (10, 30), (16, 16), (64, 0)])
def test_hits_are_whole_units_and_leave_the_last_token(unit: int, hits: int) -> None:
    assert trace_stats(TRACE, hit_unit=unit).ideal_hit_rate == hits / 100


def test_what_comes_after_a_partial_block_is_not_found() -> None:
    rows = (TraceRow(0, 15, 1, (1, 2)), TraceRow(1, 30, 1, (1, 2, 3)), TraceRow(2, 30, 1, (1, 2, 3)))
    assert known_prefixes(Trace(rows, 10)) == [0, 15, 30]


def test_rows_without_ids_share_nothing() -> None:
    stats = trace_stats(Trace((TraceRow(0, 30, 1), TraceRow(0, 30, 1)), 10))
    assert (stats.unique_input_tokens, stats.ideal_hit_rate, stats.requests_per_s) == (60, 0.0, 0.0)


@pytest.mark.parametrize("scale", [1, 64])
def test_buckets_have_the_published_edges(scale: int) -> None:
    lengths = [
        1,
        32 * 1024 - scale,
        32 * 1024,
        64 * 1024,
        128 * 1024,
        200 * 1024 - scale,
        200 * 1024,
        2**20,
    ]
    rows = tuple(TraceRow(0, length // scale or 1, 1) for length in lengths)
    counts = trace_stats(Trace(rows, 512 // scale), scale=scale).buckets
    assert [(c.bucket, c.num_rows) for c in counts] == [
        ("<32K", 2), ("32-64K", 1), ("64-128K", 1), ("128-200K", 2), ("200K+", 2)
    ]  # fmt: skip
    assert sum(c.rows_share for c in counts) == pytest.approx(1)
    assert sum(c.tokens_share for c in counts) == pytest.approx(1)


@given(length=st.integers(1, 2**31 - 1), scale=st.integers(1, 512))
def test_every_length_lies_in_one_bucket(length: int, scale: int) -> None:
    assert sum(bucket.holds(length) for bucket in length_buckets(scale)) == 1


@given(values=st.lists(st.floats(-1e6, 1e6), min_size=1))
def test_percentiles_are_those_of_numpy(values: list[float]) -> None:
    spread = Spread.of(values)
    for percent, found in ((50, spread.p50), (90, spread.p90), (99, spread.p99), (100, spread.max)):
        assert found == np.percentile(values, percent)
    assert spread.mean == np.mean(values)


@pytest.mark.parametrize("arguments", [{"hit_unit": 0}, {"scale": 0}])
def test_units_that_are_none_are_refused(arguments: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        trace_stats(TRACE, **arguments)


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    """Prompts that branch off one another at block borders."""
    rows: list[TraceRow] = []
    for time in range(draw(st.integers(1, 8))):
        old = draw(st.sampled_from(rows)).hash_ids if rows and draw(st.booleans()) else ()
        kept = old[: draw(st.integers(0, len(old)))]
        fresh = tuple(1000 * time + i for i in range(draw(st.integers(0, 3))))
        ids = kept + fresh
        # Either the last block is partial, or tokens follow that have no id.
        beyond = draw(st.integers(-7 if ids else 1, 20))
        rows.append(TraceRow(time, 8 * len(ids) + beyond, 1, ids))
    return Trace(tuple(rows), 8)


@given(trace=traces())
def test_known_prefixes_are_those_of_the_tokens(trace: Trace) -> None:
    """The naive twin: compare the prompts themselves, block by block."""
    source = TokenSource(trace, vocab_size=2**31 - 1)
    prompts = [source.prompt(index).tolist() for index in range(len(trace.rows))]
    for index, (prompt, known) in enumerate(zip(prompts, known_prefixes(trace), strict=True)):
        shared = [_common(prompt, earlier) for earlier in prompts[:index]]
        assert known == max(shared, default=0)


def _common(one: list[int], two: list[int]) -> int:
    pairs = zip(one, two, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(two)))
