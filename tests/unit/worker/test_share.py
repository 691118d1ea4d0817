"""Rows over PCP coordinates: every token once, in order, and no coordinate with much more to do."""

from hypothesis import given
from hypothesis import strategies as st

from kvspan.step import Row
from kvspan.topology import Topology
from kvspan.worker.share import Shares, deal

ROWS = st.lists(
    st.tuples(st.integers(0, 300), st.integers(1, 90)).map(lambda r: Row(0, r[0], r[1], True)),
    max_size=9,
)


def numbered(rows: list[Row]) -> list[Row]:
    return [Row(i, row.start, row.num_tokens, row.sample) for i, row in enumerate(rows)]


@given(rows=ROWS, pcp_size=st.integers(1, 8), least=st.integers(1, 100))
def test_every_token_is_worked_on_once(rows: list[Row], pcp_size: int, least: int) -> None:
    rows = numbered(rows)
    shares = deal(rows, pcp_size=pcp_size, least_tokens_to_split=least)
    assert len(shares) == pcp_size
    parts = [part for its in shares for part in its]
    positions = sorted((p.row, t) for p in parts for t in range(p.start, p.start + p.num_tokens))
    assert positions == [(r.request_id, t) for r in rows for t in range(r.start, r.start + r.num_tokens)]
    assert all(part.num_tokens > 0 for part in parts)
    for row in rows:
        if row.num_tokens < least:
            assert sum(part.row == row.request_id for part in parts) == 1
    for its in shares:
        assert [(p.row, p.start) for p in its] == sorted((p.row, p.start) for p in its)


@given(rows=ROWS, pcp_size=st.integers(1, 8), least=st.integers(1, 100), data=st.data())
def test_places_are_tokens_of_the_step(
    rows: list[Row], pcp_size: int, least: int, data: st.DataObject
) -> None:
    rows = numbered(rows)
    rank = data.draw(st.integers(0, pcp_size - 1))
    shares = Shares.of(rows, Topology(pcp_size=pcp_size, dcp_size=pcp_size), rank, least_tokens=least)
    tokens = [(r.request_id, t) for r in rows for t in range(r.start, r.start + r.num_tokens)]
    assert sorted(shares.places.tolist()) == list(range(len(tokens)))
    dealt = [(int(row), int(t)) for row, t in zip(shares.row_of, shares.positions, strict=True)]
    assert [tokens[i] for i in shares.places] == dealt
    by_hand = [
        [(p.row, t) for p in its for t in range(p.start, p.start + p.num_tokens)]
        for its in shares.by_coordinate
    ]
    assert dealt == [each for its in by_hand for each in its]
    assert dealt[shares.own_rows] == by_hand[rank]
    assert list(shares.sizes) == [len(its) for its in by_hand]
    assert shares.asking_rows == slice(0, len(tokens))
    assert [tuple(part) for part in shares.parts[shares.own_parts]] == list(shares.by_coordinate[rank])


@given(start=st.integers(0, 5000), num_tokens=st.integers(1, 5000), pcp_size=st.integers(1, 8))
def test_causal_work_of_a_row_balances(start: int, num_tokens: int, pcp_size: int) -> None:
    row = Row(0, start, num_tokens, True)
    shares = deal([row], pcp_size=pcp_size, least_tokens_to_split=1)
    pairs = [sum(part.num_pairs for part in its) for its in shares]
    chunk = -(-num_tokens // (2 * pcp_size))
    # Chunks are of ceil(n / 2P) tokens, so that the last ones may be short of a few, or missing: what a
    # coordinate lacks is at most its part of what the others have rounded up.
    assert max(pairs) - min(pairs) <= 2 * chunk * (start + num_tokens)
    if num_tokens % (2 * pcp_size) == 0:
        assert max(pairs) - min(pairs) == 0


@given(num_rows=st.integers(0, 40), pcp_size=st.integers(1, 8))
def test_decode_rows_leave_no_coordinate_idle(num_rows: int, pcp_size: int) -> None:
    rows = [Row(i, 10 * i, 1, True) for i in range(num_rows)]
    sizes = Shares.of(rows, Topology(pcp_size=pcp_size), 0, least_tokens=2).sizes
    assert max(sizes) - min(sizes) <= 1


def test_a_long_row_is_a_row_of_two_chunks_or_of_one() -> None:
    first, second = deal([Row(7, 100, 8, True)], pcp_size=2, least_tokens_to_split=8)
    assert [(p.start, p.num_tokens) for p in first] == [(100, 2), (106, 2)]
    assert [(p.start, p.num_tokens) for p in second] == [(102, 4)]
