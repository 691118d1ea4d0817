"""What travels for cached context: bytes counted by hand, and the choice that follows."""

import json
from pathlib import Path

import numpy as np
import pytest

from kvspan.config.engine import EngineConfig
from kvspan.config.model import ModelConfig, parse_model_config
from kvspan.cost.choose import Machine, resolve
from kvspan.cost.prefill import FEWEST_BYTES, PrefillRule, has_whole_heads
from kvspan.topology import Topology

MODELS = Path(__file__).parents[2] / "data" / "models"
EIGHT = Topology(tp_size=8, dcp_size=8)


def model(name: str, **overrides: int) -> ModelConfig:
    raw = json.loads((MODELS / f"{name}.json").read_text())
    return parse_model_config({**raw, **overrides}, where=name)


def rule(
    strategy: str, of: ModelConfig, topology: Topology, *, replicate_q: bool = False
) -> PrefillRule:
    return PrefillRule.of(strategy, of, topology, exchange="a2a", replicate_q=replicate_q, dtype_bytes=2)


def gathers(r: PrefillRule, num_rows: int, num_cached: int) -> bool:
    return bool(r.gathers(np.array([num_rows]), np.array([num_cached]))[0])


def test_bytes_of_deepseek_r1_on_eight_ranks() -> None:
    r = rule(FEWEST_BYTES, model("DeepSeek-R1"), EIGHT)
    query, result = 7 * 16 * 192 * 2, 7 * 16 * (128 * 2 + 4)  # 16 heads of each other rank
    assert r.row_bytes == query + result
    assert r.token_bytes == 576 * 2 * 7 // 8
    assert r.least_rows == 171
    assert rule(FEWEST_BYTES, model("DeepSeek-R1"), EIGHT, replicate_q=True).row_bytes == result
    border = 1024 * r.row_bytes // r.token_bytes
    assert gathers(r, 1024, border - 1)
    assert not gathers(r, 1024, border + 1)


@pytest.mark.parametrize("strategy", [FEWEST_BYTES, "allgather_q", "allgather_kv"])
def test_a_prompt_without_context_has_its_keys_already(strategy: str) -> None:
    for n in (1, 5, 171, 100_000):
        assert gathers(rule(strategy, model("DeepSeek-R1"), EIGHT), n, 0)


@pytest.mark.parametrize("name", ["DeepSeek-R1", "Qwen3-235B-A22B"])
def test_one_strategy_for_all_contexts(name: str) -> None:
    topology = Topology(tp_size=8, dcp_size=2)
    queries, keys = (rule(s, model(name), topology) for s in ("allgather_q", "allgather_kv"))
    for num_cached in (1, 10**7):
        assert not gathers(queries, 10**5, num_cached)
        assert gathers(keys, 171, num_cached)
        assert not gathers(keys, 1, num_cached), "a decoded token asks where the keys are"


def test_latents_that_few_rows_ask_are_not_expanded_for_them() -> None:
    keys = rule("allgather_kv", model("DeepSeek-R1"), EIGHT)
    assert not gathers(keys, 170, 1)


def test_nothing_is_gathered_where_nothing_would_be_sent() -> None:
    alone = rule("allgather_kv", model("DeepSeek-R1"), Topology(tp_size=8, dcp_size=1))
    assert not gathers(alone, 1000, 0)
    assert not gathers(alone, 1000, 1000)


@pytest.mark.parametrize("strategy", [FEWEST_BYTES, "allgather_q", "allgather_kv"])
def test_coordinates_with_copies_of_latents_expand_them_together(strategy: str) -> None:
    def copies(name: str, **overrides: int) -> PrefillRule:
        return rule(strategy, model(name, **overrides), Topology(tp_size=2, pcp_size=2))

    latents = copies("DeepSeek-R1")
    assert gathers(latents, 171, 100_000)
    assert not gathers(latents, 170, 100_000), "few rows ask the latents themselves"
    assert gathers(latents, 2, 0)
    assert not gathers(copies("Qwen3-235B-A22B"), 1000, 0), "keys are there, and nothing is made"


def test_layouts_that_cut_heads_are_left_to_queries_unless_asked() -> None:
    smollm, topology = model("SmolLM2-135M"), Topology(tp_size=2, dcp_size=2)
    assert not has_whole_heads(smollm, topology)  # 9 heads
    assert not gathers(rule(FEWEST_BYTES, smollm, topology), 1000, 0)
    assert gathers(rule("allgather_kv", smollm, topology), 1000, 0)
    assert has_whole_heads(smollm, Topology(tp_size=3, dcp_size=3))


def chosen(name: str, **asked: int | str) -> tuple[str, str]:
    config = EngineConfig.from_mapping({"model": "m", **asked})
    run = resolve(config, model(name), Machine(cores=8))
    return run.prefill_strategy, run.why.get("prefill_strategy", "")


def test_the_choice_and_its_reason() -> None:
    eight = {"tensor_parallel_size": 8, "decode_context_parallel_size": 8}
    strategy, why = chosen("DeepSeek-R1", **eight)
    assert strategy == FEWEST_BYTES
    assert why.startswith("in a layer a rank sends 72128 bytes for a row that goes to the keys and 1008")
    two = {"tensor_parallel_size": 2, "decode_context_parallel_size": 2}
    assert chosen("SmolLM2-135M", **two)[0] == "allgather_q"
    assert "heads are cut" in chosen("SmolLM2-135M", **two)[1]
    assert chosen("SmolLM2-135M", **two, prefill_strategy="allgather_kv") == ("allgather_kv", "")
    assert chosen("DeepSeek-R1")[0] == "allgather_q"
