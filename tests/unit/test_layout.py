"""Where a token lives: known answers, and what must hold of every layout."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvspan.errors import LayoutError
from kvspan.layout import (
    NO_SLOT,
    CacheLayout,
    Chunk,
    causal_pairs,
    local_len,
    owner,
    restore_order,
    slot,
    zigzag,
)

VECTORS = Path(__file__).parents[1] / "vectors"


def cases(name: str) -> list[dict]:
    return json.loads((VECTORS / f"{name}.json").read_text())["cases"]


def layout_id(case: dict) -> str:
    block = f"-B{case['block_size']}" if "block_size" in case else ""
    return f"W{case['dcp_size']}-I{case['interleave']}{block}"


def layouts() -> st.SearchStrategy[CacheLayout]:
    return st.builds(
        lambda interleave, runs, dcp_size: CacheLayout(
            block_size=interleave * runs, dcp_size=dcp_size, interleave=interleave
        ),
        interleave=st.integers(1, 5),
        runs=st.integers(1, 4),
        dcp_size=st.integers(1, 8),
    )


@pytest.mark.parametrize("case", cases("slot_mapping"), ids=layout_id)
def test_slots_are_the_known_ones(case: dict) -> None:
    sizes = {key: case[key] for key in ("block_size", "dcp_size", "interleave")}
    for rank, wanted in enumerate(case["slots_by_rank"]):
        assert [slot(p, case["block_table"], rank=rank, **sizes) for p in case["positions"]] == wanted


@pytest.mark.parametrize("case", cases("local_lengths"), ids=lambda c: f"{layout_id(c)}-L{c['length']}")
def test_local_lengths_are_the_known_ones(case: dict) -> None:
    assert [
        local_len(case["length"], rank=r, dcp_size=case["dcp_size"], interleave=case["interleave"])
        for r in range(case["dcp_size"])
    ] == case["local_lengths"]


@pytest.mark.parametrize("case", cases("query_bounds"), ids=layout_id)
def test_every_bound_is_localised_by_itself(case: dict) -> None:
    for rank, wanted in enumerate(case["local_bounds_by_rank"]):
        sizes = {"rank": rank, "dcp_size": case["dcp_size"], "interleave": case["interleave"]}
        assert [local_len(bound, **sizes) for bound in case["global_bounds"]] == wanted


@pytest.mark.parametrize("case", cases("zigzag"), ids=lambda c: f"P{c['pcp_size']}-n{c['new_tokens']}")
def test_zigzag_is_the_known_one(case: dict) -> None:
    chunks = zigzag(case["new_tokens"], pcp_size=case["pcp_size"])
    assert [[[c.offset, c.length] for c in mine] for mine in chunks] == case["chunks_by_rank"]
    assert [causal_pairs(mine) for mine in chunks] == case["causal_pairs_by_rank"]


@given(layout=layouts(), length=st.integers(0, 300))
def test_local_lengths_count_owned_tokens_and_sum_to_all(layout: CacheLayout, length: int) -> None:
    sizes = {"dcp_size": layout.dcp_size, "interleave": layout.interleave}
    owners = [owner(p, **sizes) for p in range(length)]
    local = [local_len(length, rank=r, **sizes) for r in range(layout.dcp_size)]
    assert local == [owners.count(r) for r in range(layout.dcp_size)]
    assert sum(local) == length


@given(layout=layouts(), length=st.integers(1, 200), data=st.data())
def test_a_token_has_one_slot_and_a_rank_fills_its_slots_in_order(
    layout: CacheLayout, length: int, data: st.DataObject
) -> None:
    columns = -(-length // (layout.block_size * layout.dcp_size))
    table = data.draw(st.permutations(range(columns + 3)))[:columns]
    sizes = {
        "block_size": layout.block_size,
        "dcp_size": layout.dcp_size,
        "interleave": layout.interleave,
    }
    by_rank = [[slot(p, table, rank=r, **sizes) for p in range(length)] for r in range(layout.dcp_size)]
    for position in range(length):
        assert sum(slots[position] != NO_SLOT for slots in by_rank) == 1
    for slots in by_rank:
        mine = [s for s in slots if s != NO_SLOT]
        places = (divmod(i, layout.block_size) for i in range(len(mine)))
        dense = [table[column] * layout.block_size + offset for column, offset in places]
        assert mine == dense


@pytest.mark.parametrize("pcp_size", range(1, 9))
def test_restoring_what_was_split_changes_nothing(pcp_size: int) -> None:
    for n in range(65):
        chunks = zigzag(n, pcp_size=pcp_size)
        gathered = [t for mine in chunks for c in mine for t in range(c.offset, c.offset + c.length)]
        assert [gathered[place] for place in restore_order(n, pcp_size=pcp_size)] == list(range(n))


@pytest.mark.parametrize("pcp_size", [1, 2, 3])
@pytest.mark.parametrize("n", [1, 5, 8, 63])
def test_causal_pairs_are_all_pairs(n: int, pcp_size: int) -> None:
    chunks = zigzag(n, pcp_size=pcp_size)
    naive = [sum(t + 1 for c in mine for t in range(c.offset, c.offset + c.length)) for mine in chunks]
    assert [causal_pairs(mine) for mine in chunks] == naive
    assert sum(naive) == n * (n + 1) // 2


def test_causal_pairs_of_nothing() -> None:
    assert causal_pairs([]) == 0
    assert causal_pairs([Chunk(3, 0)]) == 0


@pytest.mark.parametrize(
    ("sizes", "unit_span", "unit_tokens", "num_pools"),
    [((16, 8, 16), 1, 16, 8), ((16, 8, 1), 8, 128, 1), ((16, 1, 16), 1, 16, 1), ((16, 1, 4), 1, 16, 1)],
)
def test_unit_of_placement(
    sizes: tuple[int, int, int], unit_span: int, unit_tokens: int, num_pools: int
) -> None:
    block_size, dcp_size, interleave = sizes
    layout = CacheLayout(block_size=block_size, dcp_size=dcp_size, interleave=interleave)
    assert (layout.unit_span, layout.unit_tokens, layout.num_pools) == (
        unit_span,
        unit_tokens,
        num_pools,
    )
    assert [layout.num_units(n) for n in (0, 1, unit_tokens, unit_tokens + 1)] == [0, 1, 1, 2]


def test_interleave_that_does_not_divide_the_block_is_refused() -> None:
    with pytest.raises(
        LayoutError, match=r"interleave-size 12 does not divide --block-size 16"
    ) as refused:
        CacheLayout(block_size=16, dcp_size=2, interleave=12)
    assert refused.value.reason == "interleave_does_not_divide_block"
    assert str(refused.value).endswith("What fits: 1, 2, 4, 8, 16.")


@pytest.mark.parametrize("wrong", ["block_size", "dcp_size", "interleave"])
def test_sizes_below_one_are_refused(wrong: str) -> None:
    sizes = {"block_size": 16, "dcp_size": 2, "interleave": 16} | {wrong: 0}
    with pytest.raises(LayoutError, match="at least 1") as refused:
        CacheLayout(**sizes)
    assert refused.value.reason == "size_below_one"
