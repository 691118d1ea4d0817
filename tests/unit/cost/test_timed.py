"""Choices by time, where a machine's is known; the planner and the engine ask the same functions."""

import pytest

from kvspan.config.engine import EngineConfig
from kvspan.config.resolved import Resolved
from kvspan.cost.choose import Machine, resolve
from kvspan.cost.facts import device_of_model, find_device, load_devices
from kvspan.cost.rows import rows_bound_by_reading
from kvspan.cost.timed import USUAL_BATCH, Timed
from kvspan.plan.models import find_model
from kvspan.topology import Topology

DEVICES = load_devices()


def resolved(model: str, hardware: str | None = "H200-SXM", **asked: int | str) -> Resolved:
    config = EngineConfig.from_mapping({"model": "m", "device": "cuda", **asked})
    facts = None if hardware is None else find_device(hardware, DEVICES)
    return resolve(config, find_model(model).config, Machine(cores=8, num_gpus=8, facts=facts))


EIGHT = {"tensor_parallel_size": 8, "decode_context_parallel_size": 8}


@pytest.mark.parametrize("hardware", ["H100-SXM", "H200-SXM", "B200-SXM", "GB300"])
@pytest.mark.parametrize("model", ["DeepSeek-R1", "Kimi-K2.6", "Qwen3-235B-A22B"])
def test_the_faster_exchange_is_taken_and_both_times_are_said(model: str, hardware: str) -> None:
    run = resolved(model, hardware, **EIGHT)
    device = find_device(hardware, DEVICES)
    times = Timed.of(find_model(model).config, device, run.topology, kv_dtype_bytes=2)
    by_time = {name: times.exchange_s(name) for name in ("a2a", "ag_rs")}
    assert run.exchange == min(by_time, key=by_time.__getitem__)
    for seconds in by_time.values():
        assert f"{seconds * 1e6:.0f} us" in run.why["exchange"]
    assert hardware in run.why["exchange"]


@pytest.mark.parametrize("model", ["DeepSeek-R1", "Qwen3-235B-A22B", "Llama-3.1-70B"])
def test_queries_are_replicated_where_a_usual_request_gains(model: str) -> None:
    run = resolved(model, **EIGHT)
    device = find_device("H200-SXM", DEVICES)
    times = Timed.of(find_model(model).config, device, run.topology, kv_dtype_bytes=2)
    gathered, replicated = (
        times.request_s(exchange=run.exchange, replicate_q=whole) for whole in (False, True)
    )
    assert run.replicate_q == (replicated < gathered)
    assert f"{gathered * 1e3:.0f} ms" in run.why["replicate_q"]


def test_without_facts_bytes_decide_and_what_is_asked_stays() -> None:
    assert "bytes" in resolved("DeepSeek-R1", None, **EIGHT).why["exchange"]
    run = resolved("DeepSeek-R1", **EIGHT, dcp_comm_backend="ag_rs", dcp_q_replicate="off")
    assert (run.exchange, run.replicate_q) == ("ag_rs", False)
    assert not {"exchange", "replicate_q"} & run.why.keys()
    assert "bytes" not in resolved("DeepSeek-R1", tensor_parallel_size=8).why["exchange"]


def test_an_exchange_that_the_layout_cannot_have_is_not_chosen() -> None:
    two = {"tensor_parallel_size": 2, "decode_context_parallel_size": 2}
    assert resolved("SmolLM2-135M", **two).exchange == "a2a"


def test_the_threshold_of_a_span_is_made_of_the_same_times() -> None:
    layout = {"prefill_context_parallel_size": 2, "decode_context_parallel_size": 2}
    near, far = (
        resolved("Llama-3.1-8B", hardware, **layout, dcp_mode="elastic") for hardware in ("GB300", None)
    )
    model, device = find_model("Llama-3.1-8B").config, find_device("GB300", DEVICES)
    times = Timed.of(model, device, Topology(dcp_size=2, pcp_size=2), kv_dtype_bytes=2)
    saved_s = 131072 / 32 / 2 / times.kv_bytes_s
    assert near.span_threshold == int(times.exchange_s("a2a", 1) / saved_s)
    assert near.span_threshold != far.span_threshold


@pytest.mark.parametrize("hardware", DEVICES)
def test_rows_are_cut_when_multiplying_takes_longer_than_reading(hardware: str) -> None:
    layout = {"prefill_context_parallel_size": 2}
    rates = find_device(hardware, DEVICES).rates_of(2)
    run = resolved("Llama-3.1-8B", hardware, **layout)
    chunk = rows_bound_by_reading(rates)
    assert run.split_tokens == 2 * 2 * chunk
    assert 16 < chunk < 1000
    assert f"under {chunk} rows" in run.why["split_tokens"]
    assert resolved("Llama-3.1-8B", None, **layout).split_tokens == 2 * 2 * 16


@pytest.mark.parametrize(
    ("said", "row"),
    [
        ("NVIDIA H200", "H200-SXM"),
        ("NVIDIA H100 80GB HBM3", "H100-SXM"),
        ("NVIDIA A100-SXM4-80GB", "A100-SXM"),
        ("NVIDIA B200", "B200-SXM"),
        ("NVIDIA GB200", "GB200"),
        ("AMD Instinct MI300X", "MI300X"),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H100 NVL", None),
        ("NVIDIA L4", None),
        ("", None),
    ],
)
def test_a_gpu_is_known_by_what_its_driver_calls_it(said: str, row: str | None) -> None:
    found = device_of_model(said, DEVICES)
    assert (found.name if found else None) == row


def test_the_batch_of_the_usual_request_is_said() -> None:
    assert f"of {USUAL_BATCH} at a time" in resolved("DeepSeek-R1", **EIGHT).why["replicate_q"]
