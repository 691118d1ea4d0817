"""Up to how many rows coordinates are a team: while reading takes longest, and meeting does not."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvspan.config.engine import EngineConfig
from kvspan.cost.choose import Machine, resolve
from kvspan.cost.pace import Pace
from kvspan.cost.team import most_team_rows
from kvspan.cost.weights import WeightDtypes, rank_weights
from kvspan.plan.models import find_model
from kvspan.topology import Topology

TWO = Topology(pcp_size=2, dcp_size=2)
CORE = Pace(flops=170e9, read_bytes_s=15.6e9, gather_s=12e-6, bytes_s=4e9)
GLOO = Pace(flops=170e9, read_bytes_s=15.6e9, gather_s=1e-3, bytes_s=0.5e9)
GPU = Pace(flops=690e12, read_bytes_s=3.35e12, gather_s=20e-6, bytes_s=300e9)


def most(name: str, topology: Topology, pace: Pace) -> int:
    model = find_model(name).config
    weights = rank_weights(model, topology, replicate_q=False, dtypes=WeightDtypes())
    return most_team_rows(model, topology, pace, weights=weights)


def test_a_team_reads_less_where_reading_takes_longer_than_meeting() -> None:
    """A core multiplies 11 rows while it reads a weight: a team of 2 reads half as long up to 5 of
    each, and is ahead until it has nearly 11. SmolLM2's 10 ms of reading are worth 60 meetings over
    shared memory, and not over gloo."""
    assert 7 <= most("SmolLM2-135M", TWO, CORE) <= 11
    assert most("SmolLM2-135M", TWO, GLOO) == 0
    assert most("Llama-3.1-70B", TWO, GLOO) > 0
    assert most("Llama-3.1-70B", TWO, GPU) > 100


def test_one_coordinate_is_no_team() -> None:
    assert most("Llama-3.1-70B", Topology(tp_size=8), GPU) == 0


def test_experts_are_shared_out_as_well() -> None:
    """64 rows go to nearly all of 256 experts, of which a team of 4 reads a quarter each."""
    assert most("DeepSeek-R1", Topology(pcp_size=4, dcp_size=4), GPU) > 64


@given(
    faster=st.floats(1, 100),
    pcp_size=st.integers(2, 8),
    name=st.sampled_from(["SmolLM2-135M", "Qwen3-235B-A22B"]),
)
def test_what_costs_less_is_worth_no_fewer_rows(faster: float, pcp_size: int, name: str) -> None:
    topology = Topology(pcp_size=pcp_size, dcp_size=pcp_size)
    usual = most(name, topology, CORE)
    assert most(name, topology, replace(CORE, gather_s=CORE.gather_s / faster)) >= usual
    assert most(name, topology, replace(CORE, bytes_s=CORE.bytes_s * faster)) >= usual
    assert most(name, topology, replace(CORE, read_bytes_s=CORE.read_bytes_s * faster)) <= usual


@pytest.mark.parametrize(
    ("comm", "says"), [("shm", "read a part for everyone"), ("gloo", "reads them all")]
)
def test_an_engine_says_why(comm: str, says: str) -> None:
    model = find_model("SmolLM2-135M").config
    sizes = {"prefill_context_parallel_size": 2, "decode_context_parallel_size": 2}
    asked = EngineConfig.from_mapping({"model": "smollm2-135m", "comm": comm, **sizes})
    resolved = resolve(asked, model, Machine(num_gpus=0, cores=2), sampling_defaults={})
    assert (resolved.team_rows > 0) == (comm == "shm")
    assert says in resolved.why["team_rows"]
