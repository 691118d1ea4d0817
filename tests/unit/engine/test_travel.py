"""What travelled for cached context, counted by hand on small rows."""

import json
from pathlib import Path

import pytest

from kvspan.config.engine import EngineConfig
from kvspan.config.resolved import Resolved
from kvspan.engine.build import resolve_engine
from kvspan.engine.travel import ContextTravel
from kvspan.step import Row
from kvspan.testing.tiny import TINY


def resolved(directory: Path, strategy: str, **asked: object) -> Resolved:
    (directory / "config.json").write_text(json.dumps(TINY["llama-gqa"]))
    layout = {"tensor_parallel_size": 2, "decode_context_parallel_size": 2, "dtype": "float32", **asked}
    options = {"model": str(directory), "load_format": "dummy", "prefill_strategy": strategy, **layout}
    return resolve_engine(EngineConfig.from_mapping(options))[0]


def row(request_id: int, start: int, num_tokens: int) -> Row:
    return Row(request_id, start, num_tokens, sample=True)


@pytest.mark.parametrize("strategy", ["allgather_q", "allgather_kv"])
def test_pieces_with_context_are_counted_and_no_others(tmp_path: Path, strategy: str) -> None:
    runs = resolved(tmp_path, strategy, decode_context_parallel_size=2)
    travel = ContextTravel(runs)
    rows = [row(0, 0, 50), row(1, 40, 1), row(2, 32, 10), row(3, 16, 4)]
    found = travel.of(rows)
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
    found = ContextTravel(runs).of([row(2, 32, 10)])
    assert (found.key_bytes, found.query_bytes) == (0, 0)


def _token_bytes(runs: Resolved) -> int:
    """Half of the keys and values of a token are on the other of two ranks."""
    heads = runs.topology.kv_heads(0, runs.model_config.heads).size
    return heads * 2 * runs.model_config.head_dim * 4 // 2
