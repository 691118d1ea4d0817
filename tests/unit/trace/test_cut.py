"""Parts of traces."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvspan.errors import ConfigError
from kvspan.trace.cut import Cut, cut_trace, scaled
from kvspan.trace.row import Trace, TraceRow, num_blocks

TRACE = Trace(tuple(TraceRow(500 + 1000 * i, 100 * (i + 1), 10 * i + 1) for i in range(10)))


@pytest.mark.parametrize(
    ("cut", "kept"),
    [
        (Cut(), range(10)),
        (Cut(rows=3), range(3)),
        (Cut(skip=2, rows=3), range(2, 5)),
        (Cut(start_s=2, end_s=5), range(2, 5)),
        (Cut(start_s=2, end_s=5, skip=1), range(3, 5)),
        (Cut(max_input=300), range(3)),
    ],
    ids=str,
)
def test_rows_are_kept(cut: Cut, kept: range) -> None:
    assert cut_trace(TRACE, cut).rows == tuple(TRACE.rows[i] for i in kept)


def test_outputs_are_cut() -> None:
    outputs = [row.output_length for row in cut_trace(TRACE, Cut(max_output=25)).rows]
    assert outputs == [1, 11, 21, *[25] * 7]


@pytest.mark.parametrize("cut", [Cut(skip=10), Cut(rows=0), Cut(start_s=99), Cut(max_input=99)], ids=str)
def test_nothing_left_is_refused(cut: Cut) -> None:
    with pytest.raises(ConfigError, match="Nothing is left"):
        cut_trace(TRACE, cut)


@pytest.mark.parametrize("scale", [0, -1, 3, 1024])
def test_a_scale_that_does_not_divide_the_block_is_refused(scale: int) -> None:
    with pytest.raises(ConfigError, match=f"--scale {scale} does not divide .* 1, 2, 4"):
        cut_trace(TRACE, Cut(scale=scale))


@given(length=st.integers(1, 10**7), power=st.integers(0, 9))
def test_a_scaled_row_has_as_many_blocks(length: int, power: int) -> None:
    small = scaled(Trace((TraceRow(0, length, 1),)), scale=2**power)
    assert num_blocks(small.rows[0].input_length, small.block_tokens) == num_blocks(length, 512)
