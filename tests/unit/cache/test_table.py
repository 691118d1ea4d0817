"""A rank's table against known answers, the closed formulas and a twin that counts token by token."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvspan.cache.table import JoinedTables, RankTable
from kvspan.layout import NO_SLOT, CacheLayout, local_len

VECTORS = Path(__file__).parents[2] / "vectors"


def cases(name: str) -> list[dict]:
    return json.loads((VECTORS / f"{name}.json").read_text())["cases"]


def filled(
    layout: CacheLayout, units: list[int], *, blocks_per_pool: int, splits: tuple[int, ...] = ()
) -> list[RankTable]:
    """The table of every rank, its units appended in several parts."""
    tables = []
    for rank in range(layout.dcp_size):
        table = RankTable(layout, dcp_rank=rank, blocks_per_pool=blocks_per_pool)
        for start, stop in zip((0, *splits), (*splits, len(units)), strict=True):
            table.append(units[start:stop])
        tables.append(table)
    return tables


def round_robin(layout: CacheLayout, columns: list[int], *, blocks_per_pool: int) -> list[int]:
    """Units that go round from rank 0, on the same block of every rank in each turn."""
    return [pool * blocks_per_pool + block for block in columns for pool in range(layout.num_pools)]


@pytest.mark.parametrize("case", cases("placement"), ids=lambda c: f"{c['policy']}-L{c['length']}")
def test_placements_are_the_known_ones(case: dict) -> None:
    size, length = case["block_size"], case["length"]
    layout = CacheLayout(block_size=size, dcp_size=case["num_ranks"], interleave=size)
    units = [rank * 1000 + block for rank, block in case["blocks"]]
    last_block = (len(units) - 1) * size
    queries = np.array(case["query_positions"])
    for rank, table in enumerate(filled(layout, units, blocks_per_pool=1000)):
        assert table.blocks.tolist() == case["tables_by_rank"][rank]
        assert table.local_bounds(np.array([length])).tolist() == [case["local_lengths"][rank]]
        assert table.local_bounds(queries + 1).tolist() == case["visible_by_rank"][rank]
        assert table.slots(last_block, length).tolist() == case["slots_by_rank_of_last_block"][rank]


@pytest.mark.parametrize(
    "case",
    cases("slot_mapping"),
    ids=lambda c: f"W{c['dcp_size']}-I{c['interleave']}-B{c['block_size']}",
)
def test_round_robin_gives_the_known_slots(case: dict) -> None:
    layout = CacheLayout(**{key: case[key] for key in ("block_size", "dcp_size", "interleave")})
    units = round_robin(layout, case["block_table"], blocks_per_pool=100)
    positions = case["positions"]
    for rank, table in enumerate(filled(layout, units, blocks_per_pool=100)):
        assert table.slots(positions[0], positions[-1] + 1).tolist() == case["slots_by_rank"][rank]


@pytest.mark.parametrize("turns", [1, 3])
@pytest.mark.parametrize(
    "case", cases("query_bounds"), ids=lambda c: f"W{c['dcp_size']}-I{c['interleave']}"
)
def test_round_robin_gives_the_known_bounds(case: dict, turns: int) -> None:
    interleave = case["interleave"]
    layout = CacheLayout(block_size=interleave * turns, dcp_size=case["dcp_size"], interleave=interleave)
    columns = list(range(1 + max(case["global_bounds"]) // (layout.block_size * layout.dcp_size)))
    units = round_robin(layout, columns, blocks_per_pool=500)
    for rank, table in enumerate(filled(layout, units, blocks_per_pool=500)):
        bounds = table.local_bounds(np.array(case["global_bounds"]))
        assert bounds.tolist() == case["local_bounds_by_rank"][rank]


@st.composite
def placements(draw: st.DrawFn) -> tuple[CacheLayout, list[int], int]:
    """A layout, distinct units on any pools in any order, and the blocks of a pool."""
    interleave, runs = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    layout = CacheLayout(
        block_size=interleave * runs, dcp_size=draw(st.integers(1, 8)), interleave=interleave
    )
    blocks_per_pool = draw(st.integers(1, 12))
    all_units = st.integers(0, layout.num_pools * blocks_per_pool - 1)
    return layout, draw(st.lists(all_units, unique=True, max_size=20)), blocks_per_pool


def twin(layout: CacheLayout, units: list[int], rank: int, blocks_per_pool: int) -> list[int]:
    """The slot of every token on a rank, dealt out one by one."""
    slots = []
    for unit in units:
        pool, block = divmod(unit, blocks_per_pool)
        ranks = range(pool * layout.unit_span, (pool + 1) * layout.unit_span)
        taken = dict.fromkeys(ranks, 0)
        for offset in range(layout.unit_tokens):
            owner = ranks[offset // layout.interleave % layout.unit_span]
            slot = block * layout.block_size + taken[owner]
            taken[owner] += 1
            slots.append(slot if owner == rank else NO_SLOT)
    return slots


@given(placement=placements(), data=st.data())
def test_any_placement_equals_its_twin(
    placement: tuple[CacheLayout, list[int], int], data: st.DataObject
) -> None:
    layout, units, blocks_per_pool = placement
    split = data.draw(st.integers(0, len(units)))
    capacity = len(units) * layout.unit_tokens
    start, stop = sorted(data.draw(st.tuples(*[st.integers(0, capacity)] * 2)))
    bounds = np.arange(capacity + 1)
    locals_by_rank, shares = [], []
    for rank, table in enumerate(
        filled(layout, units, blocks_per_pool=blocks_per_pool, splits=(split,))
    ):
        slots = twin(layout, units, rank, blocks_per_pool)
        found = table.slots(start, stop)
        assert (found.dtype, found.tolist()) == (np.int64, slots[start:stop])
        local = table.local_bounds(bounds)
        counted = [sum(s != NO_SLOT for s in slots[:bound]) for bound in bounds]
        assert (local.dtype, local.tolist()) == (np.int32, counted)
        held = [s // layout.block_size for s in slots if s != NO_SLOT]
        assert (table.blocks.dtype, table.blocks.tolist()) == (np.int32, list(dict.fromkeys(held)))
        locals_by_rank.append(local)
        shares.append([table.shares(bound).tolist() for bound in bounds.tolist()])
    assert np.sum(locals_by_rank, axis=0).tolist() == bounds.tolist()
    assert all(of_rank == np.transpose(locals_by_rank).tolist() for of_rank in shares)


@given(
    interleave=st.integers(1, 4),
    runs=st.integers(1, 3),
    dcp_size=st.integers(1, 8),
    length=st.integers(0, 200),
)
def test_going_round_from_rank_0_is_the_closed_formula(
    interleave: int, runs: int, dcp_size: int, length: int
) -> None:
    layout = CacheLayout(block_size=interleave * runs, dcp_size=dcp_size, interleave=interleave)
    columns = list(range(length // (layout.block_size * dcp_size) + 1))
    units = round_robin(layout, columns, blocks_per_pool=300)
    for rank, table in enumerate(filled(layout, units, blocks_per_pool=300)):
        assert table.local_bounds(np.array([length])).tolist() == [
            local_len(length, rank=rank, dcp_size=dcp_size, interleave=interleave)
        ]


def test_an_empty_table_owns_nothing() -> None:
    table = RankTable(CacheLayout(block_size=4, dcp_size=2, interleave=4), dcp_rank=1, blocks_per_pool=8)
    table.append([])
    assert (table.num_units, table.blocks.tolist(), table.slots(0, 0).tolist()) == (0, [], [])
    assert table.local_bounds(np.array([0, 0])).tolist() == [0, 0]
    assert table.local_bounds(np.zeros(0, np.int64)).tolist() == []


def test_what_has_no_unit_has_no_slot_and_no_bound() -> None:
    table = RankTable(CacheLayout(block_size=4, dcp_size=1, interleave=4), dcp_rank=0, blocks_per_pool=8)
    table.append([5])
    with pytest.raises(AssertionError, match="without a unit"):
        table.slots(0, 5)
    with pytest.raises(AssertionError, match="beyond the units"):
        table.local_bounds(np.array([4, 5]))


def test_growing_one_by_one_keeps_what_was_there() -> None:
    layout = CacheLayout(block_size=2, dcp_size=1, interleave=2)
    table = RankTable(layout, dcp_rank=0, blocks_per_pool=3000)
    for block in reversed(range(3000)):
        table.append([block])
    assert table.blocks.tolist() == list(reversed(range(3000)))
    assert table.slots(0, 3).tolist() == [5998, 5999, 5996]


@given(data=st.data(), lengths=st.lists(st.integers(1, 40), min_size=1, max_size=5))
def test_joined_tables_answer_as_each_does_by_itself(data: st.DataObject, lengths: list[int]) -> None:
    layout = CacheLayout(block_size=4, dcp_size=2, interleave=2)
    units = iter(data.draw(st.permutations(range(200))))
    placed = [[next(units) for _ in range(layout.num_units(length))] for length in lengths]
    tables = [filled(layout, its, blocks_per_pool=200)[1] for its in placed]
    joined = JoinedTables(tables)
    which = data.draw(st.lists(st.sampled_from(range(len(tables))), unique=True))
    chosen = joined.chosen(which)
    assert (chosen is joined) == (which == list(range(len(tables))))
    for place, number in enumerate(which):
        start, stop = chosen.block_starts[place : place + 2]
        assert chosen.blocks[start:stop].tolist() == tables[number].blocks.tolist()
        positions = np.arange(lengths[number])
        slots = chosen.slots(np.full_like(positions, place), positions)
        assert slots.tolist() == tables[number].slots(0, lengths[number]).tolist()
