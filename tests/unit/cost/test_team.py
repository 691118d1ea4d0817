"""Up to how many rows coordinates are a team: while reading takes longest, and meeting does not."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvspan.config.engine import EngineConfig
from kvspan.cost.choose import Machine, resolve
from kvspan.cost.pace import Pace
from kvspan.cost.team import TeamCost
from kvspan.cost.weights import WeightDtypes, rank_weights
from kvspan.plan.models import find_model
from kvspan.topology import Span, Topology

TWO = Topology(pcp_size=2, dcp_size=2)
CORE = Pace(flops=170e9, read_bytes_s=15.6e9, gather_s=12e-6, bytes_s=4e9)
GLOO = Pace(flops=170e9, read_bytes_s=15.6e9, gather_s=1e-3, bytes_s=0.5e9)
GPU = Pace(flops=690e12, read_bytes_s=3.35e12, gather_s=20e-6, bytes_s=300e9)


def rows(name: str, topology: Topology, pace: Pace) -> Span:
    model = find_model(name).config
    weights = rank_weights(model, topology, replicate_q=False, dtypes=WeightDtypes())
    return TeamCost(model, topology, weights, pace).rows()


def test_a_team_reads_less_where_reading_takes_longer_than_meeting() -> None:
    """A core multiplies 11 rows while it reads a weight: a team of 2 reads half as long up to 5 of
    each, and is ahead until it has nearly 11. SmolLM2's 10 ms of reading are worth 60 meetings over
    shared memory, and not over gloo."""
    some = rows("SmolLM2-135M", TWO, CORE)
    assert some.start == 1
    assert 8 <= some.stop <= 12
    assert rows("SmolLM2-135M", TWO, GLOO).size == 0
    assert rows("Llama-3.1-70B", TWO, GLOO).size > 0
    assert rows("Llama-3.1-70B", TWO, GPU).stop > 100


def test_one_coordinate_is_no_team() -> None:
    assert rows("Llama-3.1-70B", Topology(tp_size=8), GPU).size == 0


def test_experts_are_shared_out_as_soon_as_coordinates_read_many_of_the_same() -> None:
    """A row reads 8 experts of 256, and rows of 4 coordinates 32 different ones, a quarter of each."""
    some = rows("DeepSeek-R1", Topology(pcp_size=4, dcp_size=4), GPU)
    assert 1 < some.start < 32
    assert some.stop > 64


@given(
    faster=st.floats(1, 100),
    pcp_size=st.integers(2, 8),
    name=st.sampled_from(["SmolLM2-135M", "Qwen3-235B-A22B"]),
)
def test_what_costs_less_is_worth_no_fewer_rows(faster: float, pcp_size: int, name: str) -> None:
    topology = Topology(pcp_size=pcp_size, dcp_size=pcp_size)
    usual = rows(name, topology, CORE).size
    assert rows(name, topology, replace(CORE, gather_s=CORE.gather_s / faster)).size >= usual
    assert rows(name, topology, replace(CORE, bytes_s=CORE.bytes_s * faster)).size >= usual
    assert rows(name, topology, replace(CORE, read_bytes_s=CORE.read_bytes_s * faster)).size <= usual


@pytest.mark.parametrize(
    ("comm", "says"), [("shm", "read a part for everyone"), ("gloo", "reads for itself")]
)
def test_an_engine_says_why(comm: str, says: str) -> None:
    model = find_model("SmolLM2-135M").config
    sizes = {"prefill_context_parallel_size": 2, "decode_context_parallel_size": 2}
    asked = EngineConfig.from_mapping({"model": "smollm2-135m", "comm": comm, **sizes})
    resolved = resolve(asked, model, Machine(num_gpus=0, cores=2), sampling_defaults={})
    assert (resolved.team_rows.size > 0) == (comm == "shm")
    assert says in resolved.why["team_rows"]
