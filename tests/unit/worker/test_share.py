"""Rows over PCP coordinates: every token once, in order, and no coordinate with much more to do."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvspan.cost.prefill import PrefillRule
from kvspan.cost.rows import least_tokens_to_split
from kvspan.cost.team import NO_TEAM
from kvspan.step import Row
from kvspan.topology import Span, Topology
from kvspan.worker.share import Homes, Part, Parts, Shares, deal, shared_out

ROWS = st.lists(
    st.tuples(st.integers(0, 300), st.integers(1, 90)).map(lambda r: Row(0, r[0], r[1], True)),
    max_size=9,
)


def numbered(rows: list[Row]) -> list[Row]:
    return [Row(i, row.start, row.num_tokens, row.sample) for i, row in enumerate(rows)]


def tokens_of(parts: list[Part]) -> list[tuple[int, int]]:
    return [(p.row, t) for p in parts for t in range(p.start, p.start + p.num_tokens)]


@st.composite
def homes_of(draw: st.DrawFn, rows: list[Row], pcp_size: int) -> list[int | None]:
    home = st.none() | st.integers(0, pcp_size - 1) if pcp_size > 1 else st.none()
    return [draw(home) for _ in rows]


@given(rows=ROWS, pcp_size=st.integers(1, 8), least=st.integers(1, 100), data=st.data())
def test_every_token_is_worked_on_once(
    rows: list[Row], pcp_size: int, least: int, data: st.DataObject
) -> None:
    rows = numbered(rows)
    homes = data.draw(homes_of(rows, pcp_size))
    travelling, staying = deal(
        rows, homes, pcp_size=pcp_size, num_homes=pcp_size, least_tokens_to_split=least
    )
    assert len(travelling) == len(staying) == pcp_size
    every = [part for its in (*travelling, *staying) for part in its]
    assert sorted(tokens_of(every)) == [
        (r.request_id, t) for r in rows for t in range(r.start, r.start + r.num_tokens)
    ]
    assert all(part.num_tokens > 0 for part in every)
    for its in (*travelling, *staying):
        assert [(p.row, p.start) for p in its] == sorted((p.row, p.start) for p in its)
    for row, home in zip(rows, homes, strict=True):
        if home is not None:
            assert (row.request_id, row.start, row.num_tokens) in staying[home]
        elif row.num_tokens < least:
            assert sum(part.row == row.request_id for part in every) == 1


@given(rows=ROWS, pcp_size=st.integers(1, 8), least=st.integers(1, 100), data=st.data())
def test_shares_of_a_rank(rows: list[Row], pcp_size: int, least: int, data: st.DataObject) -> None:
    rows = numbered(rows)
    homes = data.draw(homes_of(rows, pcp_size))
    rank = data.draw(st.integers(0, pcp_size - 1))
    topology = Topology(pcp_size=pcp_size, dcp_size=pcp_size)
    shares = Shares.of(
        rows, homes, topology, rank, num_homes=pcp_size, least_tokens=least, team_rows=NO_TEAM
    )
    tokens = [(r.request_id, t) for r in rows for t in range(r.start, r.start + r.num_tokens)]
    places = [shares.places(shares.parts_of(c)) for c in range(pcp_size)]
    assert sorted(i for its in places for i in its) == list(range(len(tokens)))
    own = [*shares.travelling[rank], *shares.staying[rank]]
    assert [tokens[i] for i in places[rank]] == tokens_of(own)
    assert shares.own_parts.position.tolist() == [t for _, t in tokens_of(own)]
    keyed = [*(p for its in shares.travelling for p in its), *shares.staying[rank]]
    assert [tokens[i] for i in shares.places(shares.keyed_parts)] == tokens_of(keyed)
    assert shares.row_sizes == tuple(len(tokens_of(list(its))) for its in shares.travelling)


@given(
    rows=ROWS,
    pcp_size=st.integers(1, 8),
    paying=st.tuples(st.integers(1, 5), st.integers(0, 40)),
    data=st.data(),
)
def test_all_coordinates_agree_on_what_each_brings_to_a_team(
    rows: list[Row], pcp_size: int, paying: tuple[int, int], data: st.DataObject
) -> None:
    """Its own rows, or as many as the fullest one where all rows decode; the missing ones are idle."""
    rows = numbered(rows)
    homes = data.draw(homes_of(rows, pcp_size))
    topology = Topology(pcp_size=pcp_size, dcp_size=pcp_size)
    team_rows = Span(paying[0], sum(paying))
    shares = [
        Shares.of(rows, homes, topology, rank, num_homes=pcp_size, least_tokens=4, team_rows=team_rows)
        for rank in range(pcp_size)
    ]
    own = [its.own_parts.num_tokens for its in shares]
    assert len({its.team for its in shares}) == 1
    if pcp_size == 1 or max(own) not in team_rows:
        assert shares[0].team == ()
        assert [its.num_idle for its in shares] == [0] * pcp_size
    elif {row.num_tokens for row in rows} == {1}:
        assert shares[0].team == (max(own),) * pcp_size
        assert [its.num_idle for its in shares] == [max(own) - n for n in own]
    else:
        assert shares[0].team == tuple(own)
        assert [its.num_idle for its in shares] == [0] * pcp_size


@given(start=st.integers(0, 5000), more=st.integers(0, 5000), pcp_size=st.integers(2, 8))
def test_visible_pairs_differ_by_a_chunk_rows_worth_at_the_most(
    start: int, more: int, pcp_size: int
) -> None:
    """Of a row that is long enough to be cut; one that 2P chunks divide is shared out evenly."""
    least = least_tokens_to_split(pcp_size)
    row = Row(0, start, least + more, True)
    travelling, _ = deal(
        [row], [None], pcp_size=pcp_size, num_homes=pcp_size, least_tokens_to_split=least
    )
    pairs = [sum(part.num_pairs for part in its) for its in travelling]
    chunk = -(-row.num_tokens // (2 * pcp_size))
    assert max(pairs) - min(pairs) <= chunk * (start + row.num_tokens)
    if row.num_tokens % (2 * pcp_size) == 0:
        assert max(pairs) == min(pairs)


@pytest.mark.parametrize("pcp_size", [2, 3, 4])
def test_short_prefills_are_not_cut(pcp_size: int) -> None:
    """A chunk of fewer rows takes as long as its weights to read, which every coordinate does."""
    least = least_tokens_to_split(pcp_size)
    for num_tokens, coordinates in ((1, 1), (least - 1, 1), (least, pcp_size)):
        row = Row(0, 0, num_tokens, True)
        travelling, _ = deal(
            [row], [None], pcp_size=pcp_size, num_homes=pcp_size, least_tokens_to_split=least
        )
        assert sum(bool(its) for its in travelling) == coordinates


@given(num_rows=st.integers(0, 40), pcp_size=st.integers(1, 8))
def test_decode_rows_leave_no_coordinate_idle(num_rows: int, pcp_size: int) -> None:
    rows = [Row(i, 10 * i, 1, True) for i in range(num_rows)]
    travelling, _ = deal(
        rows, [None] * num_rows, pcp_size=pcp_size, num_homes=pcp_size, least_tokens_to_split=2
    )
    sizes = [len(its) for its in travelling]
    assert max(sizes) - min(sizes) <= 1


def test_a_long_row_is_a_row_of_two_chunks_or_of_one() -> None:
    row = Row(7, 100, 8, True)
    (first, second), _ = deal([row], [None], pcp_size=2, num_homes=2, least_tokens_to_split=8)
    assert first == [(0, 100, 2), (0, 106, 2)]
    assert second == [(0, 102, 4)]


@given(rows=ROWS, num_homes=st.integers(1, 8), data=st.data())
def test_ranks_that_are_homes_take_all_rows_through_the_network(
    rows: list[Row], num_homes: int, data: st.DataObject
) -> None:
    rows = numbered(rows)
    homes = data.draw(homes_of(rows, num_homes))
    topology = Topology(tp_size=num_homes, dcp_size=num_homes)
    num_tokens = sum(row.num_tokens for row in rows)
    attended: list[int] = []
    for rank in range(num_homes):
        shares = Shares.of(
            rows, homes, topology, rank, num_homes=num_homes, least_tokens=1, team_rows=Span(1, 9)
        )
        assert shares.places(shares.network_parts).tolist() == list(range(num_tokens))
        spread, alone = shares.travelling[0], shares.staying[rank]
        assert tokens_of(shares.own_parts.parts) == tokens_of([*spread, *shares.local_parts])
        assert shares.local_parts == alone or {row.num_tokens for row in rows} == {1}
        assert {part.row for part in alone} == {i for i, home in enumerate(homes) if home == rank}
        attended += shares.places(Parts(alone)).tolist()
    assert sorted([*attended, *shares.places(Parts(spread)).tolist()]) == list(range(num_tokens))


@pytest.mark.parametrize("homes", [[0, 1, 0], [1, 1, 1], [0, None, 1], [0]])
@pytest.mark.parametrize("sizes", [(1, 1, 1), (1, 2, 1)])
def test_few_rows_that_decode_at_homes_are_all_attended_for(
    homes: list[int | None], sizes: tuple[int, ...]
) -> None:
    """Those of another home see nothing; with a longer row, or one that is spread, ranks pick theirs."""
    rows = [Row(i, 10 * i + 3, n, True) for i, n in enumerate(sizes[: len(homes)])]
    topology = Topology(tp_size=2, dcp_size=2)
    for rank in range(2):
        shares = Shares.of(
            rows, homes, topology, rank, num_homes=2, least_tokens=1, team_rows=Span(1, 9)
        )
        whose = range(2) if None not in homes and max(r.num_tokens for r in rows) == 1 else [rank]
        wanted = [i for i, home in enumerate(homes) if home in whose]
        assert [part.row for part in shares.local_parts] == wanted
        assert [part.row for part in shares.keyed_parts.parts if homes[part.row] is not None] == wanted


def test_a_home_shares_what_is_much_work_and_costs_no_collective_or_is_worth_one() -> None:
    whole_heads = PrefillRule(row_bytes=10, token_bytes=1, least_rows=2)
    cut_heads = PrefillRule(row_bytes=0, token_bytes=1, least_rows=2)
    cases = [(1, 0), (16, 0), (2048, 0), (1, 100_000), (100, 1_000), (100, 30_000), (2047, 1), (3000, 0)]
    rows, cached = np.array(cases).T
    fresh = [False, True, True, False, False, True, False, True]
    assert shared_out(rows, cached, whole_heads).tolist() == fresh
    worth = [False, False, False, False, False, True, False, True]
    assert shared_out(rows, cached, cut_heads).tolist() == worth


def test_coordinates_share_prompts_of_a_home_where_they_meet_anyway_or_others_would_wait_long() -> None:
    rule = PrefillRule(row_bytes=10, token_bytes=1, least_rows=2)
    homes = Homes(
        num_pools=2,
        num_homes=2,
        pcp_size=2,
        rule=rule,
        split_tokens=64,
        meet_tokens=500,
        few_rows=Span(1, 9),
    )

    def of(*rows: tuple[int, set[int]]) -> list[int | None]:
        return of_rows(homes, *rows)

    assert of((1, {0}), (63, {1}), (499, {0})) == [0, 1, 0]
    assert of((1, {0}), (63, {1}), (64, {0}), (500, {1})) == [0, 1, None, None]
    many = [(1, {1})] * 18
    assert of((1, {0, 1}), *many, (63, {1}), (64, {0})) == [None, *[1] * 19, None]
    assert of((1, {0, 1}), (1, {1}), (63, {1}), (64, {0})) == [None] * 4


@pytest.mark.parametrize(
    ("pcp_size", "few_rows"), [(1, Span(1, 16)), (2, Span(1, 5)), (2, Span(2, 9)), (2, NO_TEAM)]
)
def test_all_rows_travel_where_ranks_meet_for_one_and_few_decode(pcp_size: int, few_rows: Span) -> None:
    homes = Homes(
        num_pools=2,
        num_homes=2,
        pcp_size=pcp_size,
        rule=PrefillRule(row_bytes=10, token_bytes=1, least_rows=2),
        split_tokens=64,
        meet_tokens=500,
        few_rows=few_rows,
    )
    for number in range(1, 20):
        at_home: list[tuple[int, set[int]]] = [(1, {i % 2}) for i in range(number)]
        stay = [i % 2 for i in range(number)]
        assert of_rows(homes, *at_home) == stay
        met = of_rows(homes, *at_home[1:], (1, {0, 1}))
        is_few = -(-number // pcp_size) in few_rows
        assert met == ([None] * number if is_few else [*stay[1:], None])
        with_prompt = of_rows(homes, *at_home[1:], (1, {0, 1}), (2, {1}))
        assert with_prompt == ([None] * (number + 1) if is_few else [*stay[1:], None, 1])
        assert of_rows(homes, *at_home, (2, {1})) == [*stay, 1]  # ranks do not meet


def of_rows(homes: Homes, *rows: tuple[int, set[int]]) -> list[int | None]:
    """Homes of rows, of each of which its new tokens and pools are given."""
    steps = [Row(i, 10, n, sample=True) for i, (n, _) in enumerate(rows)]
    return homes.of_rows(steps, [its for _, its in rows])
