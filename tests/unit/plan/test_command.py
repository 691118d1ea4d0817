"""Commands that a plan prints: the server's own parser takes them, and they are what was planned."""

import json
import shlex
from functools import cache
from typing import Any

import pytest

from kvspan.cli import serve
from kvspan.cli.flags import FlagParser, asked_of
from kvspan.cli.main import main
from kvspan.config.engine import ENGINE_OPTIONS, EngineConfig
from kvspan.config.resolved import Resolved
from kvspan.cost.choose import Machine, resolve
from kvspan.cost.facts import find_device, load_devices
from kvspan.plan.asked import PlanAsked
from kvspan.plan.command import Commands, stretched_model
from kvspan.plan.held import held_weights
from kvspan.plan.models import MODELS, find_model
from kvspan.plan.search import Plan, Planned, search
from kvspan.plan.show import as_json, best_of_each, sentences
from kvspan.plan.simulate import Simulation
from kvspan.trace.row import BLOCK_TOKENS

NAMES = sorted(file.stem for file in MODELS.glob("*.json"))
DEVICES = load_devices()
LOAD = {"input": 4000, "output": 100, "concurrency": 16}


def plan(**asked: Any) -> Plan:
    read = PlanAsked.from_mapping(asked)
    return search(read, find_model(read.model), find_device(read.hardware, DEVICES))


def served(line: str) -> EngineConfig:
    """What `kvspan serve` reads in a line."""
    program, command, *words = shlex.split(line)
    assert (program, command) == ("kvspan", "serve")
    return EngineConfig.from_mapping(asked_of(parser().parse_args(words), ENGINE_OPTIONS))


@cache
def parser() -> FlagParser:
    made = FlagParser(prog="kvspan serve")
    serve.add_arguments(made)
    return made


def resolved(found: Plan, config: EngineConfig) -> Resolved:
    """What would run on the machine that was planned for."""
    machine = Machine(cores=8, num_gpus=found.asked.gpus, facts=found.device)
    return resolve(config, stretched_model(found.model.config, config), machine)


def check(found: Plan, planned: Planned) -> None:
    """The printed line runs what was planned."""
    asked, candidate = found.asked, planned.candidate
    config = served(Commands(found).of(planned))
    run = resolved(found, config)
    assert config.model == found.model.served
    of_a_host = max(found.device.host_ranks // candidate.topology.world_size, 1)
    assert run.topology == candidate.topology
    assert config.data_parallel_size == min(candidate.replicas, of_a_host)
    assert (run.block_size, run.kv_dtype) == (asked.block_size, asked.kv_cache_dtype)
    assert (run.max_num_seqs, run.max_num_batched_tokens) == (
        asked.max_num_seqs,
        asked.max_num_batched_tokens,
    )
    assert run.max_model_len == found.max_model_len(planned)
    assert run.kv_fraction == asked.gpu_memory_utilization
    assert run.expert_parallel == asked.enable_expert_parallel
    if candidate.topology.dcp_size > 1:
        assert (run.interleave, run.exchange) == (candidate.interleave, candidate.exchange)
        assert run.replicate_q == candidate.replicate_q


@pytest.mark.parametrize(
    ("hardware", "dtype"), [("B200-SXM", "fp8"), ("H200-SXM", "bf16"), ("MI300X", "int8")]
)
@pytest.mark.parametrize("name", NAMES)
def test_every_command_is_what_was_planned(name: str, hardware: str, dtype: str) -> None:
    found = plan(model=name, hardware=hardware, kv_cache_dtype=dtype, **LOAD)
    assert found.planned or hardware == "H200-SXM"
    for planned in best_of_each(found.planned):
        check(found, planned)


@pytest.mark.parametrize(
    "asked",
    [
        {"block_size": 64},
        {"block_size": 128, "max_num_seqs": 1024, "max_num_batched_tokens": 8192},
        {"max_num_seqs": 64, "max_num_batched_tokens": 64},
        {"max_num_seqs": 4096, "max_num_batched_tokens": 4096},
        {"gpu_memory_utilization": 0.5},
        {"max_model_len": 8000},
        {"max_model_len": 1_000_000},
        {"weights_dtype": "fp32"},
        {"weights_dtype": "fp32", "kv_cache_dtype": "fp32"},
        {"weights_dtype": "bf16", "kv_cache_dtype": "fp16"},
        {"enable_expert_parallel": True},
    ],
    ids=str,
)
def test_what_was_asked_otherwise_than_by_default_is_in_the_command(asked: dict[str, Any]) -> None:
    found = plan(**({"model": "qwen3-235b-a22b", "hardware": "GB300"} | LOAD | asked))
    assert found.planned
    for planned in found.planned[::7]:
        check(found, planned)


def test_a_command_has_nothing_that_the_engine_would_choose_itself() -> None:
    found = plan(model="llama-3.1-8b", gpus=1, **LOAD)
    assert Commands(found).of(found.planned[0]) == "kvspan serve meta-llama/Llama-3.1-8B"
    spread = next(
        p
        for p in plan(model="deepseek-r1", gpus=8, block_size=64, **LOAD).planned
        if p.candidate.layout == "-tp 8 -dcp 8" and p.candidate.interleave == 64
    )
    line = Commands(plan(model="deepseek-r1", gpus=8, block_size=64, **LOAD)).of(spread)
    assert "-tp 8 -dcp 8 " in line
    assert "--block-size 64" in line
    assert "interleave" not in line  # it is that of the block


@pytest.mark.parametrize("name", ["DeepSeek-R1", "Llama-3.1-70B", "SmolLM2-135M"])
def test_an_engine_starts_with_the_command_of_the_best(name: str) -> None:
    """On simulated ranks: its own admission finds room for the longest request."""
    found = plan(model=name, kv_cache_dtype="fp8", **LOAD)
    best = found.planned[0]
    run = resolved(found, served(Commands(found).of(best)))
    engine = Simulation(run, best.cost, block_tokens=BLOCK_TOKENS)
    askable = run.max_num_seqs * run.max_model_len  # more is not allocated
    assert engine.core.total_tokens == min(best.capacity.tokens, askable)


def test_the_command_stands_on_a_line_of_its_own_and_in_json(
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = ["plan", "llama-3.1-70b", "--kv-cache-dtype", "fp8", "--block-size", "64"]
    assert main(flags) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("kvspan serve ")]
    found = plan(model="llama-3.1-70b", kv_cache_dtype="fp8", block_size=64)
    assert lines == [Commands(found).of(found.planned[0])]
    assert main([*flags, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["layouts"][0]["command"] == lines[0]
    assert all(point["command"].startswith("kvspan serve ") for point in told["front"])


def test_where_no_layout_keeps_the_times_no_command_is_told() -> None:
    found = plan(model="llama-3.1-8b", tpot="1us", **LOAD)
    assert not [said for said in sentences(found) if "kvspan serve" in said]


def test_a_model_is_served_under_a_name_that_can_be_found() -> None:
    names = {name: find_model(name).served for name in NAMES}
    assert names["Kimi-K2.6"] == "moonshotai/Kimi-K2.6"
    assert names.pop("SmolLM2-135M") == "smollm2-135m"  # a package
    assert all("/" in name for name in names.values())
    assert find_model(str(MODELS / "Llama-3.1-8B.json")).served == str(MODELS)


def test_replicas_on_several_machines_are_a_server_on_each() -> None:
    found = plan(model="llama-3.1-8b", hardware="H200-SXM", gpus=16, **LOAD)
    assert found.planned[0].candidate.layout == "-tp 4 -dcp 1 -dp 4"
    *_, told, line = sentences(found)
    assert "on each of 2 machines" in told
    assert line == "kvspan serve meta-llama/Llama-3.1-8B -tp 4 -dp 2"


@pytest.mark.parametrize(
    ("hardware", "gpus", "machines", "asked"),
    [
        ("H200-SXM", 16, 2, {"model": "deepseek-r1", "weights_dtype": "bf16"}),
        ("GB200", 8, 2, {"model": "deepseek-v2-lite", "goal": "capacity"}),
    ],
)
def test_ranks_over_several_machines_are_told_to_be_what_kvspan_cannot_start(
    hardware: str, gpus: int, machines: int, asked: dict[str, Any]
) -> None:
    found = plan(hardware=hardware, gpus=gpus, **LOAD, **asked)
    best = found.planned[0]
    assert found.hosts_of_replica(best) == machines
    (told,) = (said for said in sentences(found) if "cannot start" in said)
    assert f"{machines} machines of {found.device.host_ranks} {hardware}" in told
    of_one = [p for p in found.planned if found.hosts_of_replica(p) == 1]
    commands = [said for said in sentences(found) if said.startswith("kvspan serve")]
    assert commands == [Commands(found).of(p) for p in of_one[:1]]
    layouts = as_json(found, [])["layouts"]
    assert (layouts[0]["command"], layouts[0]["hosts_per_replica"]) == (None, machines)


def test_ways_out_that_kvspan_cannot_run_are_marked() -> None:
    found = plan(model="deepseek-r1", hardware="H200-SXM", weights_dtype="bf16", **LOAD)
    assert not found.planned
    fp8, _, more = found.ways_out
    assert fp8 == "--weights-dtype fp8 (on paper: kvspan holds them as bf16)"
    assert more == "--gpus 16 (on several machines, over which kvspan starts no ranks)"


def test_weights_that_kvspan_decodes_are_told_with_what_it_needs() -> None:
    found = plan(model="deepseek-r1", hardware="H200-SXM", **LOAD)
    held = held_weights(found)
    assert held is not None
    assert held.weight_bytes is not None
    # 671e9 parameters of 2 bytes, of which latent attention keeps some on every rank
    assert held.weight_bytes == pytest.approx(671e9 * 2 / 8, rel=0.1)
    assert (held.fits, held.gpus) == (False, 11)
    (told,) = (said for said in sentences(found) if "on paper" in said)
    assert "do not fit; 11 GPUs at least in one machine, where this hardware has 8" in told
    assert "It would be this, if kvspan could hold such weights:" in sentences(found)
    fitting = plan(model="llama-3.1-70b", hardware="H200-SXM", weights_dtype="fp8", **LOAD)
    assert "What was planned, but for its weights, is what this runs:" in sentences(fitting)
    told_json = as_json(found, [])
    assert told_json["weights_on_paper"]
    assert told_json["weights_held"]["gpus"] == 11
    assert not plan(
        model="deepseek-r1", gpus=10, hardware="H200-SXM", weights_dtype="bf16", **LOAD
    ).planned
    assert plan(model="deepseek-r1", gpus=11, hardware="H200-SXM", weights_dtype="bf16", **LOAD).planned


def test_nvfp4_is_told_to_be_nothing_that_kvspan_reads() -> None:
    found = plan(model="llama-3.1-8b", weights_dtype="nvfp4", gpus=1, **LOAD)
    assert "kvspan reads no nvfp4 checkpoints" in " ".join(sentences(found))
    assert "which fit; 1 GPUs at least" in " ".join(sentences(found))


def test_weights_that_are_held_as_planned_need_no_word() -> None:
    found = plan(model="llama-3.1-8b", **LOAD)
    assert held_weights(found) is None
    assert not as_json(found, [])["weights_on_paper"]
    assert "on paper" not in " ".join(sentences(found))


def test_no_command_is_given_in_json_where_a_replica_is_on_several_machines() -> None:
    found = plan(model="kimi-k2.6", hardware="B200-SXM", gpus=16, weights_dtype="bf16", **LOAD)
    told = as_json(found, [])
    commands = {each["layout"]: each["command"] for each in told["layouts"]}
    assert {each["command"] for each in told["front"]} <= set(commands.values())
    assert None in commands.values()
    assert all(each["command"] == commands[each["layout"]] for each in told["front"])
