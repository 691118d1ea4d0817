"""Ranks, groups and heads: known answers, and what must hold of every legal layout."""

import json
import re
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvspan.errors import LayoutError
from kvspan.layout import CacheLayout
from kvspan.topology import Heads, LayoutMode, Span, Topology, check_layout, cut, legal_layouts

VECTORS = Path(__file__).parents[1] / "vectors"


def cases(name: str) -> list[dict]:
    return json.loads((VECTORS / f"{name}.json").read_text())["cases"]


def rule_id(case: dict) -> str:
    t, w, p = (case[f"{kind}_parallel_size"] for kind in ("tensor", "decode_context", "prefill_context"))
    heads = f"H{case['num_attention_heads']}-Hkv{case['num_key_value_heads']}"
    return f"T{t}-W{w}-P{p}-{heads}" + "-mla" * case["mla"] + f"-{case['mode_or_reason']}"


def verdict(case: dict) -> str:
    """Mode of a legal layout, or the reason why it is refused."""
    topology = Topology(
        tp_size=case["tensor_parallel_size"],
        dcp_size=case["decode_context_parallel_size"],
        pcp_size=case["prefill_context_parallel_size"],
    )
    heads = Heads(case["num_attention_heads"], 1 if case["mla"] else case["num_key_value_heads"])
    try:
        mode = check_layout(topology, heads)
        if "interleave" in case:
            CacheLayout(
                block_size=case["block_size"],
                dcp_size=topology.dcp_size,
                interleave=case["interleave"],
            )
    except LayoutError as refused:
        return refused.reason
    return mode.value


@pytest.mark.parametrize("case", cases("layout_rules"), ids=rule_id)
def test_rules_give_the_known_verdicts(case: dict) -> None:
    assert verdict(case) == case["mode_or_reason"]
    assert case["accepted"] == (verdict(case) in set(LayoutMode))


@pytest.mark.parametrize(
    "case", cases("rank_groups"), ids=lambda c: f"T{c['tp']}-P{c['pcp']}-W{c['dcp']}"
)
def test_groups_are_the_known_ones(case: dict) -> None:
    topology = Topology(tp_size=case["tp"], dcp_size=case["dcp"], pcp_size=case["pcp"])
    found = {"tp": topology.tp_groups(), "pcp": topology.pcp_groups(), "dcp": topology.dcp_groups()}
    assert {kind: [list(group) for group in groups] for kind, groups in found.items()} == case["groups"]


def refusal(topology: Topology, heads: Heads) -> LayoutError | None:
    try:
        check_layout(topology, heads)
    except LayoutError as refused:
        return refused
    return None


def topologies() -> st.SearchStrategy[Topology]:
    """Topologies whose groups exist, whatever the heads."""

    def build(pcp: int, width: int, turns: int, spread: bool) -> Topology:
        return Topology(tp_size=width * turns, dcp_size=width * pcp if spread else 1, pcp_size=pcp)

    return st.builds(build, st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.booleans())


@given(topologies())
def test_every_rank_is_in_one_group_of_each_kind(topology: Topology) -> None:
    world = list(range(topology.world_size))
    for groups in (topology.tp_groups(), topology.pcp_groups(), topology.dcp_groups()):
        assert sorted(rank for group in groups for rank in group) == world


@given(topologies())
def test_ranks_of_a_dcp_group_count_up_and_share_their_heads(topology: Topology) -> None:
    for group in topology.dcp_groups():
        assert len(group) == topology.dcp_size
        assert [topology.dcp_rank(rank) for rank in group] == list(range(topology.dcp_size))
        assert all(topology.dcp_group(rank) == group for rank in group)
        assert len({topology.attention_tp_rank(rank) for rank in group}) == 1


@given(
    topology=topologies(),
    kv_heads=st.integers(1, 12),
    queries_a_head=st.integers(1, 4),
)
def test_legal_layouts_put_keys_beside_the_queries_that_need_them(
    topology: Topology, kv_heads: int, queries_a_head: int
) -> None:
    heads = Heads(kv_heads * queries_a_head, kv_heads)
    assume(refusal(topology, heads) is None)
    shards: Counter[tuple[int, int]] = Counter()
    for rank in range(topology.world_size):
        kept, queries = topology.kv_heads(rank, heads), topology.query_heads(rank, heads)
        wanted = {q // queries_a_head for q in range(queries.start, queries.stop)}
        assert wanted == set(range(kept.start, kept.stop))
        shards.update((head, topology.dcp_rank(rank)) for head in wanted)
    assert set(shards) == {(h, r) for h in range(kv_heads) for r in range(topology.dcp_size)}


@given(topology=topologies(), heads=st.builds(Heads, st.integers(1, 64), st.integers(1, 16)))
def test_accepted_layouts_split_query_heads_evenly(topology: Topology, heads: Heads) -> None:
    assume(refusal(topology, heads) is None)
    spans = [topology.query_heads(rank, heads) for rank in topology.tp_groups()[0]]
    ways = sorted({(span.start, span.stop) for span in spans})
    assert [ways[0][0], ways[-1][1]] == [0, heads.num_heads]
    assert all(a[1] == b[0] for a, b in pairwise(ways))
    assert len({stop - start for start, stop in ways}) == 1


@given(
    sizes=st.tuples(st.integers(-1, 12), st.integers(-1, 12), st.integers(-1, 4)),
    heads=st.builds(Heads, st.integers(1, 64), st.integers(1, 16)),
)
def test_a_refusal_names_a_rule_and_layouts_that_are_legal(
    sizes: tuple[int, int, int], heads: Heads
) -> None:
    tp, dcp, pcp = sizes
    topology = Topology(tp_size=tp, dcp_size=dcp, pcp_size=pcp)
    refused = refusal(topology, heads)
    assume(refused is not None)
    assert refused.reason
    assert refused.fits
    for fit in refused.fits:
        assert fit in str(refused)
        flags = dict(re.findall(r"-(\w+) (\d+)", fit))
        asked = {f"{name}_size": int(value) for name, value in flags.items()}
        assert refusal(Topology(**asked), heads) is None


@pytest.mark.parametrize(
    ("tp", "dcp", "heads", "numbers"),
    [
        (6, 2, Heads(24, 2), ["2 KV heads", "3 attention-TP ranks", "size 6"]),
        (12, 4, Heads(24, 2), ["2 KV heads", "3 attention-TP ranks", "size 12"]),
        (12, 2, Heads(24, 4), ["4 KV heads", "6 attention-TP ranks", "size 12"]),
        (24, 2, Heads(48, 8), ["8 KV heads", "12 attention-TP ranks", "size 24"]),
    ],
)
def test_a_group_that_straddles_kv_heads_is_refused_in_a_sentence(
    tp: int, dcp: int, heads: Heads, numbers: list[str]
) -> None:
    with pytest.raises(LayoutError) as refused:
        check_layout(Topology(tp_size=tp, dcp_size=dcp), heads)
    assert refused.value.reason == "group_straddles_kv_heads"
    for number in numbers:
        assert number in str(refused.value)
    assert "Layouts that fit: -tp" in str(refused.value)
    assert refused.value.fits == tuple(legal_layouts(Topology(tp_size=tp, dcp_size=dcp), heads))


def test_a_dcp_size_that_does_not_divide_is_refused_with_both_numbers() -> None:
    with pytest.raises(ValueError, match=r"parallel-size 3 takes .* does not divide .*parallel-size 8"):
        check_layout(Topology(tp_size=8, dcp_size=3), Heads(64, 8))


def test_several_kv_heads_a_rank_are_legal_by_one_rule() -> None:
    heads = Heads(32, 4)
    topology = Topology(tp_size=8, dcp_size=4)
    assert check_layout(topology, heads) is LayoutMode.DECOUPLED
    assert [topology.kv_heads(rank, heads).size for rank in range(8)] == [2] * 8
    spread = Topology(tp_size=4, dcp_size=2, pcp_size=2)
    assert check_layout(spread, Heads(32, 8)) is LayoutMode.DECOUPLED
    assert [spread.kv_heads(rank, Heads(32, 8)).size for rank in range(8)] == [2] * 8


@given(size=st.integers(0, 500), parts=st.integers(1, 12), unit=st.integers(1, 16))
def test_pieces_cover_a_dim_and_are_balanced_to_a_unit(size: int, parts: int, unit: int) -> None:
    pieces = [cut(size, parts=parts, index=i, unit=unit) for i in range(parts)]
    assert (pieces[0].start, pieces[-1].stop) == (0, size)
    assert all(a.stop == b.start for a, b in pairwise(pieces))
    assert all(p.start % unit == 0 or p.start == size for p in pieces)
    in_units = [-(-p.size // unit) for p in pieces]
    assert max(in_units) - min(in_units) <= 1


def test_a_piece_may_be_empty() -> None:
    assert [cut(8, parts=3, index=i).size for i in range(3)] == [0, 0, 8]
    assert Span(3, 3).size == 0
