"""Figures of a run that was written down by hand, and percentiles against numpy."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvspan.bench.figures import figures, steady_window
from kvspan.bench.record import Observed, Record, Sample


def record(index: int, sent_s: float, arrivals_s: list[float], **more: object) -> Record:
    whole = {"due_s": sent_s, "end_s": arrivals_s[-1] if arrivals_s else None, "cached_tokens": 5}
    return Record(
        index=index,
        input_tokens=10,
        sent_s=sent_s,
        arrivals_s=arrivals_s,
        piece_tokens=[1] * len(arrivals_s),
        **{**whole, **more},  # type: ignore[arg-type]
    )


RUN = Observed(
    records=[
        record(0, 0.0, [0.5, 0.7, 1.0]),
        record(1, 0.0, [1.0, 2.0, 3.0], due_s=-0.25),
        record(2, 1.0, [3.0, 4.0, 4.5], cached_tokens=0),
        record(3, 3.0, [4.25], end_s=None),
        record(4, 3.0, [], end_s=3.5, error="HTTP 500: no", cached_tokens=None),
    ],
    samples=[
        Sample(start_s=0.0, lasts_s=2.0, running=1, kv_used=0.9, prefill_tokens=50, output_tokens=1),
        Sample(start_s=2.0, lasts_s=2.0, running=2, kv_used=0.2, prefill_tokens=6, output_tokens=4),
        Sample(start_s=4.0, lasts_s=1.0, running=5, kv_used=0.5, prefill_tokens=0, output_tokens=10),
    ],
    preemptions=3,
    filled_s=2.0,
    drained_s=5.0,
    end_s=6.0,
)


def test_known_answers() -> None:
    found = figures(RUN, num_ranks=2)
    assert (found.num_ok, found.num_errors, found.num_unfinished) == (3, 1, 1)
    assert found.errors == {"HTTP 500: no": 1}
    assert found.window_s == (2.0, 5.0)
    assert found.output_tokens_per_s == pytest.approx(6 / 3)  # 2.0, 3.0, 3.0, 4.0, 4.25, 4.5
    assert found.output_tokens_per_s_per_rank == pytest.approx(1)
    assert found.requests_per_s == pytest.approx(2 / 3)
    assert found.input_tokens_per_s == pytest.approx(20 / 3)
    assert found.hit_rate == pytest.approx(5 / 20)
    assert found.lag_ms is not None
    assert found.lag_ms.max == 250


def test_known_latencies() -> None:
    of_all = figures(RUN, num_ranks=1).latencies
    assert of_all.num_requests == 4
    assert of_all.ttft_ms is not None
    assert of_all.ttft_ms.mean == pytest.approx((500 + 1000 + 2000 + 1250) / 4)
    assert of_all.tpot_ms is not None
    assert (of_all.tpot_ms.p50, of_all.tpot_ms.max) == (pytest.approx(750), pytest.approx(1000))
    assert of_all.itl_ms is not None
    assert of_all.itl_ms.mean == pytest.approx((200 + 300 + 1000 + 1000 + 1000 + 500) / 6)
    assert of_all.e2e_ms is not None
    assert of_all.e2e_ms.max == pytest.approx(3500)
    assert of_all.tokens_per_s_per_user == pytest.approx(1000 / 750)


def test_what_the_engine_did_in_the_window() -> None:
    engine = figures(RUN, num_ranks=1).engine
    assert engine.running_mean == pytest.approx((2 * 2 + 5 * 1) / 3)
    assert engine.running_max == 5
    assert engine.kv_used_mean == pytest.approx((0.2 * 2 + 0.5) / 3)
    assert engine.kv_used_max == 0.5
    assert engine.prefill_token_share == pytest.approx(6 / 20)
    assert engine.prefill_time_share == pytest.approx(2 / 3)
    assert engine.preemptions == 3


@pytest.mark.parametrize(
    ("filled_s", "drained_s", "window"),
    [(None, None, (0, 6)), (2, None, (2, 6)), (None, 5, (0, 5)), (5, 2, (0, 6)), (6, None, (0, 6))],
)
def test_a_run_without_a_steady_window_counts_whole(
    filled_s: float | None, drained_s: float | None, window: tuple[float, float]
) -> None:
    run = Observed(filled_s=filled_s, drained_s=drained_s, end_s=6.0)
    assert steady_window(run) == window


def test_a_run_without_anything_has_figures() -> None:
    found = figures(Observed(), num_ranks=4)
    assert (found.num_ok, found.output_tokens_per_s, found.hit_rate) == (0, 0.0, None)
    assert found.latencies.ttft_ms is None
    assert found.engine.running_mean is None


def test_lengths_have_latencies_of_their_own() -> None:
    short, long = record(0, 0.0, [1.0, 2.0]), record(1, 0.0, [3.0, 5.0])
    long.input_tokens = 70 * 1024 // 64
    found = figures(Observed(records=[short, long], end_s=10.0), num_ranks=1, scale=64)
    assert list(found.by_length) == ["<32K", "64-128K"]
    tpot_ms = found.by_length["64-128K"].tpot_ms
    assert tpot_ms is not None
    assert tpot_ms.p50 == pytest.approx(2000)
    assert found.by_length["<32K"].output_tokens_per_s == pytest.approx(0.2)


@given(ttft_s=st.lists(st.floats(0.001, 100), min_size=1, max_size=50))
def test_percentiles_are_those_of_numpy(ttft_s: list[float]) -> None:
    run = Observed(records=[record(i, 0.0, [s]) for i, s in enumerate(ttft_s)], end_s=200.0)
    spread = figures(run, num_ranks=1).latencies.ttft_ms
    assert spread is not None
    for percent, value in ((50, spread.p50), (90, spread.p90), (99, spread.p99)):
        assert value == pytest.approx(np.percentile(np.array(ttft_s) * 1000, percent))


@given(pieces=st.integers(1, 30), total=st.integers(1, 200))
def test_usage_corrects_what_pieces_hold(pieces: int, total: int) -> None:
    one = record(0, 0.0, [float(i) for i in range(pieces)])
    one.set_output_tokens(total)
    assert one.output_tokens == total
    assert len(one.piece_tokens) == pieces
    assert max(one.piece_tokens) - min(one.piece_tokens) <= 1
