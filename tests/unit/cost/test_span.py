"""From which length on requests are spread, and which layouts have homes for the others."""

import pytest

from kvspan.config.engine import EngineConfig
from kvspan.config.model import parse_model_config
from kvspan.config.resolved import Resolved
from kvspan.cost.choose import Machine, resolve
from kvspan.cost.latents import NEVER
from kvspan.errors import ConfigError
from kvspan.plan.models import find_model
from kvspan.testing.tiny import TINY

RANKS = {"tensor_parallel_size": 3, "decode_context_parallel_size": 3}
HOMES = {"prefill_context_parallel_size": 2, "decode_context_parallel_size": 2}


def resolved_of(**options: object) -> Resolved:
    asked = EngineConfig.from_mapping({"model": "m", **options})
    model = parse_model_config(TINY["llama-gqa-9x3"], where="tiny")
    return resolve(asked, model, Machine(cores=2))


def threshold(**options: object) -> tuple[int, str | None]:
    resolved = resolved_of(**options)
    return resolved.span_threshold, resolved.why.get("span_threshold")


@pytest.mark.parametrize("kv_dtype", ["auto", "int8", "fp8"])
def test_dearer_exchanges_keep_longer_requests_at_home(kv_dtype: str) -> None:
    options = {**HOMES, "dcp_mode": "elastic", "kv_cache_dtype": kv_dtype}
    near, why = threshold(**options, comm="shm")
    far, _ = threshold(**options, comm="gloo")
    assert 0 < near < far
    assert why is not None
    assert f"{near:,} tokens" in why


def test_a_static_layout_spreads_everything_and_says_that_a_threshold_is_idle() -> None:
    assert threshold(**HOMES) == (0, None)
    assert threshold(**HOMES, dcp_span_threshold=100)[0] == 0
    assert threshold(**HOMES, dcp_mode="elastic", dcp_span_threshold=100) == (100, None)


@pytest.mark.parametrize("layout", [HOMES, RANKS], ids=["coordinates", "ranks"])
def test_the_dearer_an_exchange_the_rarer_are_steps_that_have_one(layout: dict[str, object]) -> None:
    assert resolved_of(**layout).spread_every == 1
    near, far = (
        resolved_of(**layout, dcp_mode="elastic", comm=comm).spread_every for comm in ("shm", "gloo")
    )
    assert 1 <= near < far


def test_a_home_computes_prompts_alone_as_long_as_others_would_meet_for_longer_than_they_wait() -> None:
    """135 million weights are 1.6 ms a token at 170 GFLOP/s, of which others wait for half; 30 layers
    hand keys round in 60 ms over gloo, and in 0.72 ms over shared memory."""
    assert resolved_of(**HOMES).meet_tokens == NEVER
    assert resolved_of(**RANKS, dcp_mode="elastic").meet_tokens == NEVER
    model = find_model("SmolLM2-135M").config
    for comm, tokens in (("shm", 2), ("gloo", 152)):
        asked = EngineConfig.from_mapping({"model": "m", **HOMES, "dcp_mode": "elastic", "comm": comm})
        resolved = resolve(asked, model, Machine(cores=2))
        assert resolved.meet_tokens == tokens
        assert f"the products of {tokens} tokens take" in resolved.why["meet_tokens"]


def test_a_model_whose_steps_cost_far_more_than_an_exchange_has_one_in_each() -> None:
    model = find_model("Llama-3.1-8B").config
    asked = EngineConfig.from_mapping(
        {
            "model": "m",
            "tensor_parallel_size": 2,
            "decode_context_parallel_size": 2,
            "dcp_mode": "elastic",
            "comm": "shm",
        }
    )
    assert resolve(asked, model, Machine(cores=2)).spread_every == 1


def test_a_rank_that_is_a_home_has_all_queries_of_its_group() -> None:
    resolved = resolved_of(**RANKS, dcp_mode="elastic")
    assert resolved.replicate_q
    assert resolved.num_homes == 3
    assert "copies of their weights" in resolved.why["replicate_q"]
    assert resolved_of(**HOMES, dcp_mode="elastic").num_homes == 2
    assert resolved_of(**RANKS).num_homes == 1


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"tensor_parallel_size": 3}, "-tp 3 -dcp 3"),
        ({"prefill_context_parallel_size": 2}, "-tp 1 -pcp 2 -dcp 2"),
        ({}, "--decode-context-parallel-size 1"),
        ({**RANKS, "dcp_q_replicate": "off"}, "--dcp-q-replicate off"),
        ({**HOMES, "cp_kv_cache_interleave_size": 4}, "--cp-kv-cache-interleave-size 4"),
    ],
)
def test_a_layout_without_homes_is_refused(options: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        threshold(**options, dcp_mode="elastic")
