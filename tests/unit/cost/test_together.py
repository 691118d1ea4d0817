"""From how many latents on PCP coordinates make keys and values of them together."""

from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvspan.config.engine import EngineConfig
from kvspan.config.resolved import Resolved
from kvspan.cost.choose import Machine, resolve
from kvspan.cost.deployment import Deployment
from kvspan.cost.facts import Device, find_device, load_devices
from kvspan.cost.latents import NEVER
from kvspan.cost.pace import Pace
from kvspan.cost.steptime import StepCost
from kvspan.cost.together import least_tokens_together, made_elements
from kvspan.cost.weights import WeightDtypes
from kvspan.cost.work import StepWork
from kvspan.plan.models import find_model
from kvspan.topology import Topology

R1 = find_model("DeepSeek-R1").config
TWO = Topology(pcp_size=2, dcp_size=2)
CORE = Pace(flops=170e9, read_bytes_s=24e9, gather_s=12e-6, bytes_s=4e9)
GPU = Pace(flops=690e12, read_bytes_s=3.35e12, gather_s=20e-6, bytes_s=300e9)


def least(topology: Topology, pace: Pace, *, model: str = "DeepSeek-R1", dtype_bytes: int = 2) -> int:
    config = find_model(model).config
    return least_tokens_together(config, topology, pace, dtype_bytes=dtype_bytes)


def test_cores_share_and_gpus_make_what_they_need() -> None:
    """512 products an element: a core makes 43 while it takes one from another, an H100 2,300."""
    assert least(TWO, CORE) < 10
    assert least(TWO, GPU) == NEVER
    assert least(TWO, replace(CORE, bytes_s=0.3e9)) == NEVER


def test_only_coordinates_make_what_others_make_too() -> None:
    assert least(Topology(tp_size=8, dcp_size=8), CORE) == NEVER
    assert least(TWO, CORE, model="Llama-3.1-8B") == NEVER


def test_a_rank_makes_its_own_heads() -> None:
    assert made_elements(R1, TWO) == 128 * (128 + 128)
    assert made_elements(R1, Topology(tp_size=4, pcp_size=2, dcp_size=8)) == 32 * (128 + 128)
    assert made_elements(find_model("Llama-3.1-8B").config, TWO) == 0


@given(
    p=st.integers(2, 4),
    flops=st.floats(1e10, 1e15),
    gather_s=st.floats(1e-6, 1e-2),
    bytes_s=st.floats(1e8, 1e12),
    dtype_bytes=st.sampled_from([2, 4]),
)
def test_sharing_is_no_slower_from_there_on(
    p: int, flops: float, gather_s: float, bytes_s: float, dtype_bytes: int
) -> None:
    """Against both times written out: to make all of n latents, or a share and gather the others."""
    topology = Topology(pcp_size=p, dcp_size=p)
    found = least(topology, Pace(flops, 24e9, gather_s, bytes_s), dtype_bytes=dtype_bytes)
    elements = made_elements(R1, topology)

    def gain_s(tokens: int) -> float:
        all_s = tokens * elements * 2 * 512 / flops
        others = tokens * elements * (1 - 1 / p) * dtype_bytes
        return all_s - (all_s / p + gather_s + others / bytes_s)

    if found == NEVER:
        assert gain_s(10**9) <= 0
    else:
        assert gain_s(found + 1) >= 0
        assert found == 1 or gain_s(found - 1) <= 0


def resolved(**asked: int | str) -> Resolved:
    config = EngineConfig.from_mapping({"model": "m", **asked})
    cuda = asked.get("device") == "cuda"
    facts = find_device("H200-SXM", load_devices()) if cuda else None
    return resolve(config, R1, Machine(cores=2, num_gpus=8 if cuda else 0, facts=facts))


def test_the_choice_and_its_reason() -> None:
    layout = {"prefill_context_parallel_size": 2, "decode_context_parallel_size": 2}
    by_comm = {comm: resolved(**layout, comm=comm) for comm in ("shm", "gloo")}
    assert by_comm["shm"].together_tokens < by_comm["gloo"].together_tokens < NEVER
    assert "512 products" in by_comm["shm"].why["together_tokens"]
    cuda = resolved(**layout, device="cuda")
    assert cuda.together_tokens == NEVER
    assert cuda.why["together_tokens"].endswith("each makes all it needs.")
    assert "together_tokens" not in resolved().why


def cost_of(device: Device, topology: Topology) -> StepCost:
    return StepCost(
        Deployment(model=R1, device=device, topology=topology, dtypes=WeightDtypes(), kv_dtype_bytes=2)
    )


@pytest.mark.parametrize("slower", [1, 1000])
def test_the_planner_counts_what_is_shared_and_what_is_gathered(slower: int) -> None:
    """A machine whose ranks multiply a thousand times slower shares, beside the same links."""
    fast = find_device("H200-SXM", load_devices())
    rates = tuple(
        msgspec.structs.replace(
            r, gemm_tflops={kind: tflops / slower for kind, tflops in r.gemm_tflops.items()}
        )
        for r in fast.rates
    )
    cost = cost_of(msgspec.structs.replace(fast, rates=rates), TWO)
    work = StepWork.of([(0, 8192)], num_sampled=1, ways=cost.ways)
    assert work.local_keys == 8192
    parts = cost.parts_s(work)
    rarely = msgspec.structs.replace(  # so slow links that nobody shares
        cost.on.device,
        collectives=tuple(
            msgspec.structs.replace(c, bus_gbs=dict.fromkeys(c.bus_gbs, 1e-3))
            for c in cost.on.device.collectives
        ),
    )
    alone = cost_of(rarely, TWO).parts_s(work)
    share_flops = 8192 / 2 * made_elements(R1, TWO) * 2 * 512
    saved_s = R1.num_layers * share_flops / (rates[0].gemm_tflops["bf16"] * 1e12)
    shares = slower > 1
    assert alone["projections"] - parts["projections"] == pytest.approx(shares * saved_s, abs=1e-9)
