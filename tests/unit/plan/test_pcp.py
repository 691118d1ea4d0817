"""Prefill context parallelism in plans and simulations."""

from typing import Any

import pytest

from kvspan.config.engine import EngineConfig
from kvspan.cost.facts import find_device, load_devices
from kvspan.plan.asked import PlanAsked
from kvspan.plan.models import find_model
from kvspan.plan.replay import engine_config, simulate
from kvspan.plan.search import Plan, Planned, search
from kvspan.plan.show import sentences


def plan(**asked: Any) -> Plan:
    read = PlanAsked.from_mapping(asked)
    return search(read, find_model(read.model), find_device(read.hardware, load_devices()))


def layout(found: Plan, flags: str) -> Planned:
    return next(p for p in found.planned if p.candidate.layout == flags)


@pytest.fixture(scope="module")
def long_prompts() -> Plan:
    return plan(model="llama-3.1-8b", gpus=2, input=100_000, output=100, concurrency=1)


def test_the_first_token_of_a_long_prompt_comes_sooner(long_prompts: Plan) -> None:
    """Than on one rank, in about half the time; and than with tensor parallelism, which sums."""
    one, rows, both, matrices = (
        layout(long_prompts, flags).points[0].steady.ttft_s
        for flags in ("-tp 1 -dcp 1 -dp 2", "-tp 1 -dcp 1 -pcp 2", "-tp 1 -dcp 2 -pcp 2", "-tp 2 -dcp 1")
    )
    assert 0.5 < rows / one < 0.62
    assert 0.5 < both / one < 0.7
    assert rows < matrices


def test_only_a_cache_that_dcp_spreads_over_coordinates_grows(long_prompts: Plan) -> None:
    tokens = {p.candidate.layout: p.capacity.tokens for p in long_prompts.planned}
    assert tokens["-tp 1 -dcp 1 -pcp 2"] == tokens["-tp 1 -dcp 1 -dp 2"]
    assert tokens["-tp 1 -dcp 2 -pcp 2"] == 2 * tokens["-tp 1 -dcp 1 -pcp 2"]


@pytest.mark.parametrize("flags", ["-tp 1 -dcp 1 -pcp 2", "-tp 1 -dcp 2 -pcp 2"])
def test_what_is_planned_is_what_is_simulated_and_can_be_asked_for(
    long_prompts: Plan, flags: str
) -> None:
    planned = layout(long_prompts, flags)
    config = engine_config(long_prompts, planned)
    assert isinstance(config, EngineConfig)
    assert config.prefill_context_parallel_size == 2
    simulated = simulate(long_prompts, planned)
    steady = planned.points[0].steady
    assert simulated.ttft_s == pytest.approx(steady.ttft_s, rel=0.15)
    assert simulated.tpot_s == pytest.approx(steady.tpot_s, rel=0.15)


def test_no_layout_is_said_to_be_missing(capsys: pytest.CaptureFixture[str]) -> None:
    from kvspan.cli.main import main

    assert main(["plan", "llama-3.1-8b", "--gpus", "2", "--goal", "latency"]) == 0
    out = capsys.readouterr().out
    assert "-pcp 2" in out
    assert "cannot run" not in out


def test_a_cache_that_holds_the_requests_and_not_the_whole_context_is_simulated() -> None:
    """And the flags say so: the engine would refuse what a request of all positions has no room for."""
    found = plan(model="deepseek-r1", gpus=8, input=4000, output=50, concurrency=2, requests=4)
    planned = layout(found, "-tp 4 -dcp 2 -pcp 2")
    assert planned.capacity.tokens < 163840
    assert engine_config(found, planned).max_model_len == planned.capacity.tokens
    assert simulate(found, planned).num_served >= 4
    tight = plan(model="llama-3.1-70b", gpus=1, input=4000, output=50)
    assert f"--max-model-len {tight.max_model_len(tight.planned[0])}" in sentences(tight)[-1]
