"""What travelled for cached context, counted by hand on small rows."""

import dataclasses
import json
from pathlib import Path

import msgspec
import pytest

from kvspan.config.engine import EngineConfig
from kvspan.config.resolved import Resolved
from kvspan.engine.build import resolve_engine
from kvspan.engine.travel import ContextTravel, Travelled
from kvspan.step import Row
from kvspan.testing.tiny import TINY
from kvspan.topology import Span

CUT_HEADS = TINY["llama-gqa-9x3"] | {"head_dim": 16}
"""Of 9 heads of 16 each of 2 ranks has 72 columns, so that one is cut."""


def resolved(
    directory: Path, strategy: str, *, model: object = TINY["llama-gqa"], **asked: object
) -> Resolved:
    (directory / "config.json").write_text(json.dumps(model))
    layout = {"tensor_parallel_size": 2, "decode_context_parallel_size": 2, "dtype": "float32", **asked}
    options = {"model": str(directory), "load_format": "dummy", "prefill_strategy": strategy, **layout}
    return resolve_engine(EngineConfig.from_mapping(options))[0]


def on_all_pools(_: int) -> set[int]:
    return {0, 1}


def row(request_id: int, start: int, num_tokens: int) -> Row:
    return Row(request_id, start, num_tokens, sample=True)


@pytest.mark.parametrize("strategy", ["allgather_q", "allgather_kv"])
def test_pieces_with_context_are_counted_and_no_others(tmp_path: Path, strategy: str) -> None:
    runs = resolved(tmp_path, strategy, decode_context_parallel_size=2)
    travel = ContextTravel(runs)
    rows = [row(0, 0, 50), row(1, 40, 1), row(2, 32, 10), row(3, 16, 4)]
    found = travel.of(rows, on_all_pools)
    model = runs.model_config
    key_bytes = model.num_layers * 48 * _token_bytes(runs)
    counted = found.num_keys if strategy == "allgather_kv" else found.num_queries
    assert counted == 2
    if strategy == "allgather_kv":
        assert (found.key_bytes, found.num_queries, found.query_bytes) == (key_bytes, 0, 0)
    else:
        assert found.query_bytes > 0
        assert found.query_bytes % (model.num_layers * 14) == 0
        assert (found.num_keys, found.key_bytes) == (0, 0)


def test_one_rank_sends_nothing(tmp_path: Path) -> None:
    runs = resolved(tmp_path, "auto", tensor_parallel_size=1, decode_context_parallel_size=1)
    assert ContextTravel(runs).of([row(2, 32, 10)], on_all_pools) == Travelled()


def test_what_lies_at_a_home_travels_only_for_rows_that_are_too_much_for_it(tmp_path: Path) -> None:
    """100 rows over 30,000 tokens are more than 2 million pairs, over 1,000 they are not."""
    elastic = {"dcp_mode": "elastic", "dcp_span_threshold": 1 << 16}
    travel = ContextTravel(resolved(tmp_path, "allgather_q", **elastic))
    short, long = row(0, 1000, 100), row(0, 30_000, 100)
    assert travel.of([short], lambda _: {1}) == Travelled()
    assert travel.of([short], on_all_pools).num_queries == 1
    assert travel.of([short, long], lambda _: {1}) == travel.of([long], on_all_pools)


def test_ranks_meet_for_pieces_that_are_too_much_for_a_home_unless_their_keys_are_all_fresh(
    tmp_path: Path,
) -> None:
    """3,000 rows are over 4 million pairs."""
    elastic = {"dcp_mode": "elastic", "dcp_span_threshold": 1 << 16}
    whole = ContextTravel(resolved(tmp_path, "auto", **elastic))
    cut = ContextTravel(resolved(tmp_path, "auto", model=CUT_HEADS, **elastic))

    def met(travel: ContextTravel, *rows: Row, pools: frozenset[int] = frozenset({1})) -> int:
        return travel.of(rows, lambda _: pools).num_met

    decode, short, long, further = row(0, 3000, 1), row(1, 0, 500), row(2, 0, 3000), row(2, 3000, 900)
    assert met(whole, decode, short, long) == 0
    assert met(whole, decode, short, further) == 1
    assert (met(cut, decode, short), met(cut, long)) == (0, 1)
    everywhere = frozenset({0, 1})
    assert met(cut, short, long, pools=everywhere) == 2
    assert met(whole, further, pools=everywhere) == 1


COORDINATES = {"tensor_parallel_size": 1, "prefill_context_parallel_size": 2}


def test_coordinates_that_share_out_a_fresh_prompt_hand_keys_round_and_do_not_meet(
    tmp_path: Path,
) -> None:
    elastic = {**COORDINATES, "dcp_mode": "elastic", "dcp_span_threshold": 1 << 16, "comm": "shm"}
    travel = ContextTravel(resolved(tmp_path, "auto", **elastic))

    def met_and_shared(*rows: Row) -> tuple[int, int]:
        found = travel.of(rows, lambda _: {1})
        return found.num_met, found.num_shared

    decode, short, fresh, further = row(0, 300, 1), row(1, 0, 20), row(2, 0, 900), row(2, 900, 900)
    assert met_and_shared(decode) == (0, 0)
    assert met_and_shared(decode, short) == (0, 0)
    assert met_and_shared(decode, fresh) == (0, 1)
    assert met_and_shared(decode, further) == (1, 1)  # what is cached of it lies at its home


def test_whole_sequences_on_each_coordinate_are_shared_out_and_travel_nowhere(tmp_path: Path) -> None:
    travel = ContextTravel(resolved(tmp_path, "auto", **COORDINATES, decode_context_parallel_size=1))
    rows = [row(0, 300, 1), row(1, 500, 900)]
    assert travel.of(rows, lambda _: {0}) == Travelled(num_shared=1)


def test_a_team_multiplies_steps_of_as_many_rows_as_it_pays_for(tmp_path: Path) -> None:
    runs = resolved(tmp_path, "auto", **COORDINATES)
    alone = ContextTravel(msgspec.structs.replace(runs, team_rows=Span(0, 0)))
    team = ContextTravel(msgspec.structs.replace(runs, team_rows=Span(1, 9)))
    few, many = ([row(i, 100, 1) for i in range(count)] for count in (16, 17))
    assert [t.of(few, on_all_pools).by_team for t in (alone, team)] == [False, True]
    assert not team.of(many, on_all_pools).by_team  # one coordinate has 9 of them
    prompts = [row(0, 0, 6), row(1, 64, 5)]
    found = team.of(prompts, on_all_pools)
    assert found.by_team
    assert found == dataclasses.replace(alone.of(prompts, on_all_pools), by_team=True)
    assert not team.of([row(0, 0, 200)], on_all_pools).by_team


def _token_bytes(runs: Resolved) -> int:
    """Half of the keys and values of a token are on the other of two ranks."""
    heads = runs.topology.kv_heads(0, runs.model_config.heads).size
    return heads * 2 * runs.model_config.head_dim * 4 // 2
