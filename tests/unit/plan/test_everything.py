"""Plans of anything: no crash, no figure that cannot be, and more of a thing never gives less."""

import math
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kvspan.cost.facts import find_device, load_devices
from kvspan.cost.weights import WEIGHT_BITS
from kvspan.errors import ConfigError
from kvspan.plan.asked import GOALS, PlanAsked
from kvspan.plan.models import MODELS, find_model
from kvspan.plan.search import Candidate, Plan, Planned, search
from kvspan.plan.show import as_json, layout_rows, sentences

NAMES = sorted(file.stem for file in MODELS.glob("*.json"))
DEVICES = load_devices()


def plan(**asked: Any) -> Plan:
    read = PlanAsked.from_mapping(asked)
    return search(read, find_model(read.model), find_device(read.hardware, DEVICES))


def check(found: Plan) -> None:
    """Everything that must hold of any plan."""
    assert found.planned or found.refused
    for planned in found.planned:
        check_planned(planned)
    for refused in found.refused:
        assert refused.why.strip()
    users = [point.tok_s_user for _, point in found.front]
    assert users == sorted(users)
    assert sentences(found)
    assert len(layout_rows(found.planned)) == len(found.planned)
    as_json(found, [])


def check_planned(planned: Planned) -> None:
    capacity, world = planned.capacity, planned.candidate.topology.world_size
    assert capacity.weight_bytes > 0
    assert 0 < capacity.kv_bytes_per_token < 1 << 24
    assert capacity.tokens >= capacity.hit_unit > 0
    assert planned.room >= planned.candidate.replicas
    for point in planned.points:
        s = point.steady
        figures = (s.ttft_s, s.tpot_s, s.output_tok_s, s.computed_tok_s, s.input_tok_s)
        assert all(math.isfinite(figure) and figure > 0 for figure in figures), planned.candidate.layout
        assert 0 <= s.hit_rate < 1
        assert 1 <= s.running <= max(point.concurrency, 1)
        assert point.output_tok_s_gpu == pytest.approx(s.output_tok_s / world)


questions = st.fixed_dictionaries(
    {
        "model": st.sampled_from(NAMES),
        "hardware": st.sampled_from(sorted(DEVICES)),
        "gpus": st.sampled_from([1, 2, 3, 4, 6, 8, 12, 16]),
        "weights_dtype": st.sampled_from(["auto", *WEIGHT_BITS]),
        "kv_cache_dtype": st.sampled_from(["bf16", "fp8", "int8", "fp32"]),
        "block_size": st.sampled_from([8, 16, 64, 128]),
        "goal": st.sampled_from(GOALS),
        "output": st.integers(1, 2000),
        "shared_prefix": st.sampled_from([0.0, 0.3, 0.99]),
        "enable_expert_parallel": st.booleans(),
    },
    optional={
        "input": st.integers(1, 200_000),
        "concurrency": st.integers(1, 3000),
        "tpot": st.sampled_from(["1us", "20ms", "1s"]),
    },
)


@settings(max_examples=25, deadline=None)
@given(questions)
def test_any_question_has_an_answer(asked: dict[str, Any]) -> None:
    limit = find_model(asked["model"]).config.max_position_embeddings
    assume(asked.get("input", 1) + asked["output"] <= limit)
    check(plan(**asked))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("hardware", sorted(DEVICES))
@pytest.mark.parametrize("name", NAMES)
def test_every_model_on_every_hardware(name: str, hardware: str) -> None:
    for gpus in (1, 2, 8, 16):
        check(plan(model=name, hardware=hardware, gpus=gpus))


@settings(max_examples=20, deadline=None)
@given(st.sampled_from(NAMES), st.sampled_from(sorted(DEVICES)), st.data())
def test_more_memory_never_holds_less(name: str, hardware: str, data: st.DataObject) -> None:
    low, high = sorted(data.draw(st.tuples(*[st.floats(0.3, 1.0)] * 2)))
    asked = {"model": name, "hardware": hardware, "concurrency": 8, "input": 4000, "output": 100}
    less, more = (
        {p.candidate: p for p in found.planned}
        for found in (plan(**asked, gpu_memory_utilization=share) for share in (low, high))
    )
    assert less.keys() <= more.keys()
    for layout, planned in less.items():
        assert planned.capacity.tokens <= more[layout].capacity.tokens
        assert planned.room <= more[layout].room


@pytest.mark.parametrize("name", NAMES)
def test_eight_bits_hold_more_and_nearly_twice_as_much(name: str) -> None:
    asked = {"model": name, "hardware": "GB300", "concurrency": 8, "input": 4000, "output": 100}
    two, one = (
        {p.candidate: p for p in plan(**asked, kv_cache_dtype=dtype).planned}
        for dtype in ("bf16", "fp8")
    )
    for layout, planned in two.items():
        assert 1.8 < one[layout].capacity.tokens / planned.capacity.tokens <= 2.1


@pytest.mark.parametrize("name", ["DeepSeek-R1", "Llama-3.1-70B", "SmolLM2-135M"])
def test_longer_prompts_leave_room_for_fewer_and_take_longer(name: str) -> None:
    before: dict[Candidate, Planned] = {}
    for tokens in (1000, 2000, 4000, 7000):
        found = plan(model=name, hardware="GB300", input=tokens, output=100, concurrency=4)
        now = {p.candidate: p for p in found.planned}
        for layout in before.keys() & now.keys():
            assert now[layout].room <= before[layout].room
            assert now[layout].points[0].steady.ttft_s >= before[layout].points[0].steady.ttft_s
        before = now


def test_a_prompt_is_as_long_as_the_model_allows_unless_said() -> None:
    assert plan(model="smollm2-135m").load.input_tokens == 8192 - 512
    assert plan(model="deepseek-r1").load.input_tokens == 8192
    assert plan(model="deepseek-r1", max_model_len=2048, output=48).load.input_tokens == 2000
    with pytest.raises(ConfigError, match="--input 1 and --output 9000 are over the 8192"):
        plan(model="smollm2-135m", output=9000)
    with pytest.raises(ConfigError, match="--new-tokens 8000 is over --input 7680"):
        plan(model="smollm2-135m", new_tokens=8000)
