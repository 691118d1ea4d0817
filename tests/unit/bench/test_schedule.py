"""Which request goes when, without a clock."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvspan.bench.schedule import ClosedLoop, Due, OpenLoop, sessions
from kvspan.errors import ConfigError
from kvspan.trace.row import Trace, TraceRow
from kvspan.trace.synth import PROFILES, synthesize

TALKS = Trace(
    (
        TraceRow(0, 25, 1, (0, 1, 2)),
        TraceRow(1, 25, 1, (0, 5, 6)),
        TraceRow(2, 45, 1, (0, 1, 7, 8, 9)),  # extends row 0
        TraceRow(3, 20, 1, (0, 5)),  # whole blocks as row 1 has them: it goes on from it
        TraceRow(4, 9, 1, (3,)),  # no whole block
        TraceRow(5, 50, 1, (0, 1, 7, 8, 10)),  # extends row 2
        TraceRow(6, 30, 1),
    ),
    block_tokens=10,
)


def test_rows_that_extend_one_another_are_a_session() -> None:
    assert sessions(TALKS) == [[0, 2, 5], [1, 3], [4], [6]]


def test_sessions_of_made_up_agents_are_found_again() -> None:
    trace = synthesize(PROFILES["agentic"], num_rows=300)
    found = sessions(trace)
    assert sorted(index for turns in found for index in turns) == list(range(300))
    assert 20 < len(found) < 60
    for turns in found:
        assert turns == sorted(turns)


def test_an_open_loop_goes_by_the_clock() -> None:
    trace = Trace(tuple(TraceRow(t, 1, 1) for t in (500, 1500, 1500, 4500)))
    loop = OpenLoop(trace, speed_up=2.0)
    assert loop.take(0.0) == [Due(0, 0.0)]
    assert loop.next_s() == 0.5
    assert loop.take(0.49) == []
    assert loop.take(0.6) == [Due(1, 0.5), Due(2, 0.5)]
    assert not loop.drained
    assert loop.take(9.0) == [Due(3, 2.0)]
    assert loop.drained
    assert loop.next_s() is None


def test_users_go_through_sessions_turn_by_turn() -> None:
    loop = ClosedLoop(TALKS, users=2)
    assert loop.take(0.0) == [Due(0, 0.0), Due(1, 0.0)]
    assert loop.take(1.0) == []
    loop.ended(1, 1.5)
    assert loop.next_s() == 1.5
    assert loop.take(1.5) == [Due(3, 1.5)]
    loop.ended(3, 2.0)
    assert loop.take(2.0) == [Due(4, 2.0)]
    loop.ended(0, 3.0)
    loop.ended(4, 3.0)
    assert loop.take(3.0) == [Due(2, 3.0), Due(6, 3.0)]
    assert not loop.drained
    loop.ended(6, 4.0)
    assert loop.drained
    loop.ended(2, 5.0)
    assert loop.take(5.0) == [Due(5, 5.0)]
    loop.ended(5, 6.0)
    assert loop.take(9.0) == []


@given(users=st.integers(1, 9), order=st.randoms(use_true_random=False))
def test_every_row_is_sent_once_after_its_predecessor(users: int, order: object) -> None:
    loop, under_way, sent = ClosedLoop(TALKS, users=users), set[int](), list[int]()
    now_s = 0.0
    while True:
        for due in loop.take(now_s):
            under_way.add(due.index)
            sent.append(due.index)
        assert len(under_way) <= users
        if not under_way:
            break
        ended = order.choice(sorted(under_way))  # type: ignore[attr-defined]
        under_way.remove(ended)
        now_s += 1
        loop.ended(ended, now_s)
    assert sorted(sent) == list(range(len(TALKS.rows)))
    for turns in sessions(TALKS):
        assert [index for index in sent if index in turns] == turns


@pytest.mark.parametrize("speed_up", [0.0, -1.0, float("inf"), float("nan")])
def test_a_speed_that_is_none_is_refused(speed_up: float) -> None:
    with pytest.raises(ConfigError, match="--speed-up"):
        OpenLoop(TALKS, speed_up=speed_up)


def test_no_users_are_refused() -> None:
    with pytest.raises(ConfigError, match="--concurrency 0"):
        ClosedLoop(TALKS, users=0)
