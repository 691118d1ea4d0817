"""Plans: exact bytes, legal layouts by the one rule, reasons for the others, nonsense refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvspan.cli.main import main
from kvspan.cost.facts import find_device, load_devices
from kvspan.cost.memory import kv_bytes_per_token
from kvspan.cost.steptime import StepCost
from kvspan.cost.weights import active_params
from kvspan.cost.work import StepWork, decode_work, distinct_experts
from kvspan.errors import ConfigError, LayoutError, ModelError
from kvspan.plan.asked import PlanAsked
from kvspan.plan.models import MODELS, find_model
from kvspan.plan.search import Plan, search
from kvspan.topology import check_layout

KV_BYTES = json.loads((Path(__file__).parents[2] / "data" / "kv_bytes.json").read_text())


def plan(**asked: Any) -> Plan:
    read = PlanAsked.from_mapping(asked)
    return search(read, find_model(read.model), find_device(read.hardware, load_devices()))


@pytest.mark.parametrize(("name", "num_bytes"), KV_BYTES["per_token"].items())
def test_kv_bytes_of_one_copy(name: str, num_bytes: int) -> None:
    assert kv_bytes_per_token(find_model(name).config, kv_dtype_bytes=2) == num_bytes


@pytest.mark.parametrize("known", KV_BYTES["per_gpu"], ids=str)
def test_kv_bytes_of_a_gpu(known: dict[str, Any]) -> None:
    found = plan(model=known["model"], hardware="GB300", input=1024, output=16)
    wanted = f"-tp {known['tp']} -dcp {known['dcp']}"
    per_gpu = {p.capacity.kv_bytes_per_token for p in found.planned if p.candidate.layout == wanted}
    assert per_gpu == {known["bytes"]}


def test_deepseek_at_64k_takes_4_29_gib() -> None:
    per_token = plan(model="deepseek-r1", hardware="b200-sxm").kv_bytes_per_token
    assert per_token * 65536 / 2**30 == pytest.approx(4.29, abs=0.005)


@pytest.mark.parametrize(
    ("name", "billions"),
    [("DeepSeek-R1", 37), ("Kimi-K2.6", 32), ("Llama-3.1-8B", 7.5), ("Qwen3-235B-A22B", 22)],
)
def test_active_parameters_are_those_that_the_models_are_known_for(name: str, billions: float) -> None:
    assert active_params(find_model(name).config) / 1e9 == pytest.approx(billions, rel=0.06)


@pytest.mark.parametrize("name", ["DeepSeek-R1", "Qwen3-235B-A22B", "SmolLM2-135M", "Llama-3.1-70B"])
def test_every_layout_is_planned_or_refused_by_the_one_rule(name: str) -> None:
    found = plan(model=name, hardware="GB300", gpus=8, input=1000, output=10)
    heads = found.model.config.heads
    for planned in found.planned:
        check_layout(planned.candidate.topology, heads)
    assert all(
        refused.why.endswith((".", ")")) or "Layouts that fit" in refused.why
        for refused in found.refused
    )
    assert not {p.candidate.layout for p in found.planned} & {r.layout for r in found.refused}


def test_9_heads_are_decoupled_on_8_ranks_and_tp_8_alone_is_refused() -> None:
    found = plan(model="SmolLM2-135M", gpus=8, input=1000, output=10)
    assert any(p.candidate.layout == "-tp 8 -dcp 8" for p in found.planned)
    refused = {r.layout: r.why for r in found.refused}
    with pytest.raises(LayoutError) as error:
        check_layout(
            next(p for p in found.planned).candidate.topology.__class__(tp_size=8),
            found.model.config.heads,
        )
    assert refused["-tp 8 -dcp 1"] == str(error.value)


def test_mla_under_tp_alone_gains_no_capacity_from_gpus() -> None:
    capacity = {
        p.candidate.layout: p.capacity.tokens
        for p in plan(model="DeepSeek-V2-Lite", gpus=8, input=1000, output=10).planned
    }
    assert capacity["-tp 8 -dcp 1"] < 1.3 * capacity["-tp 1 -dcp 1 -dp 8"]
    assert capacity["-tp 8 -dcp 8"] > 7 * capacity["-tp 8 -dcp 1"]


def test_the_front_is_not_beaten() -> None:
    found = plan(model="qwen3-235b-a22b", input=20000, output=500)
    points = [point for p in found.planned for point in p.points]
    for _, best in found.front:
        beaten = [
            p
            for p in points
            if p.output_tok_s_gpu > best.output_tok_s_gpu and p.tok_s_user > best.tok_s_user
        ]
        assert not beaten


def test_times_are_kept_and_goals_differ() -> None:
    asked = {"model": "kimi-k2.6", "input": 32000, "output": 400, "weights_dtype": "nvfp4"}
    fast = plan(**asked, tpot="15ms", ttft="5s").planned[0].best
    assert fast is not None
    assert fast.steady.tpot_s <= 0.015
    assert plan(**asked).planned[0].best.output_tok_s_gpu > fast.output_tok_s_gpu  # type: ignore[union-attr]
    assert plan(**asked, tpot="1us").planned[0].best is None
    latency = plan(**asked, goal="latency").planned[0]
    assert latency.best is not None
    assert latency.best.concurrency == 1


def test_prefill_attention_is_quadratic_and_chunks_add_up() -> None:
    cost = plan(model="llama-3.1-8b", gpus=1, input=1000, output=10).planned[0].cost
    whole = StepWork.of([(0, 8192)], num_sampled=1)
    chunks = [StepWork.of([(i * 1024, 1024)], num_sampled=0) for i in range(8)]
    assert sum(c.pairs for c in chunks) == whole.pairs == 8192 * 8193 / 2
    assert attention(cost, StepWork.of([(0, 131072)], num_sampled=1)) > 200 * attention(cost, whole)


def attention(cost: StepCost, work: StepWork) -> float:
    return cost.parts_s(work)["attention"]


def test_experts_are_read_once_however_many_rows_go_there() -> None:
    assert distinct_experts(256, experts_per_token=8, num_tokens=1) == pytest.approx(8)
    assert distinct_experts(256, experts_per_token=8, num_tokens=10_000) == pytest.approx(256)
    cost = plan(model="deepseek-r1").planned[0].cost
    one, many = (cost.parts_s(decode_work(100, batch=n))["experts"] for n in (1, 64))
    assert 4 < many / one < 32


def test_a_model_that_cannot_fit_says_by_how_much_and_what_would(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["plan", "deepseek-r1", "--gpus", "2", "--hardware", "h200-sxm"]) == 2
    out = capsys.readouterr().out
    assert "70,272 bytes a token" in out
    assert "Nothing fits. What would: --weights-dtype nvfp4" not in out  # 4 bits are over 2 GPUs too
    assert "--gpus 8" in out or "--gpus 4" in out
    assert "GiB more than it has room for" in out


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--gpus", "0"], "--gpus 0"),
        (["--gpus", "-8"], "--gpus -8"),
        (["--gpus", "1000000000"], "--gpus 1000000000"),
        (["--input", "0"], "--input 0"),
        (["--input", "-5"], "--input -5"),
        (["--output", "1e9"], "--output 1e9"),
        (["--input", "9999999999999"], "--input"),
        (["--input", "300000"], "262144"),
        (["--shared-prefix", "1.5"], "--shared-prefix 1.5"),
        (["--shared-prefix", "nan"], "--shared-prefix nan"),
        (["--ttft", "-1s"], "--ttft"),
        (["--tpot", "fast"], "--tpot fast"),
        (["--hardware", "B100"], "GB200"),
        (["--weights-dtype", "int2"], "int2"),
        (["--kv-cache-dtype", "int2"], "int2"),
        (["--goal", "cheap"], "--goal cheap"),
        (["--block-size", "12"], "--block-size 12"),
        (["--new-tokens", "90000"], "--new-tokens 90000"),
        (["--turns", "4"], "--new-tokens"),
        (["--max-num-seqs", "100000"], "--max-num-batched-tokens"),
        (["--facts", "nowhere.toml"], "nowhere.toml"),
        (["--frobnicate"], "--frobnicate"),
    ],
)
def test_nonsense_is_refused_with_the_reason(
    flags: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "kimi-k2.6", *flags]) == 2
    captured = capsys.readouterr()
    assert said in captured.err.replace("\n", " ")
    assert not captured.out


@pytest.mark.parametrize(
    "key", ["num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size"]
)
def test_a_missing_key_is_named(tmp_path: Path, key: str) -> None:
    raw = json.loads((MODELS / "Llama-3.1-8B.json").read_text())
    del raw[key]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ModelError, match=f'"{key}" is missing'):
        find_model(str(tmp_path))


def test_bare_sizes_are_enough(tmp_path: Path) -> None:
    keys = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads")
    raw = json.loads((MODELS / "Llama-3.1-8B.json").read_text())
    sizes = {key: raw[key] for key in (*keys, "intermediate_size", "vocab_size")}
    file = tmp_path / "bare.json"
    file.write_text(json.dumps(sizes))
    assert kv_bytes_per_token(find_model(str(file)).config, kv_dtype_bytes=2) == 131072


@pytest.mark.parametrize("name", ["Kimi-K2.6", "kimi-k2.6", "moonshotai/Kimi-K2.6", "kimi_k2_6"])
def test_a_model_is_found_however_it_is_spelled(name: str) -> None:
    assert find_model(name).name == "Kimi-K2.6"


def test_an_unknown_model_lists_near_ones() -> None:
    with pytest.raises(ModelError, match=r"Llama-3\.1-8B"):
        find_model("llama-3-8b-instruct")


def test_json_and_html(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "plan.html"
    flags = ["--input", "67k", "--output", "400", "--json", "--html", str(page)]
    assert main(["plan", "deepseek-r1", *flags]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["kv_bytes_per_token"] == 70272
    assert found["layouts"][0]["best"]["output_tok_s_gpu"] > 0
    assert found["refused"]
    assert page.read_text().count("<svg") == 2
    again = tmp_path / "again.html"
    main(["plan", "deepseek-r1", *flags[:-1], str(again)])
    assert again.read_text() == page.read_text()


def test_thousands_of_gpus_are_replicas() -> None:
    found = plan(model="qwen2.5-72b", gpus=4096, input=8000, output=500)
    assert found.planned[0].candidate.replicas * found.planned[0].candidate.topology.world_size == 4096


def test_a_point_that_no_layout_can_have_is_an_error() -> None:
    with pytest.raises(ConfigError, match="--input"):
        plan(model="smollm2-135m", input=9000, output=10)


def bare(tmp_path: Path, *, heads: int, kv_heads: int) -> str:
    file = tmp_path / "bare.json"
    sizes = {
        "num_hidden_layers": 2,
        "hidden_size": heads * 64,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": 1024,
        "vocab_size": 1000,
    }
    file.write_text(json.dumps(sizes))
    return str(file)


def test_a_layout_that_two_validators_would_judge_differently_is_planned() -> None:
    """T=4 P=2 W=2 with 8 KV heads: two of them a rank."""
    found = plan(model="llama-3.1-8b", gpus=8, input=1000, output=10)
    assert "-tp 4 -dcp 2 -pcp 2" in {p.candidate.layout for p in found.planned}


@pytest.mark.parametrize(
    ("tp", "dcp", "heads", "kv_heads"), [(6, 2, 24, 2), (12, 4, 24, 2), (12, 2, 24, 4), (24, 2, 48, 8)]
)
def test_a_group_that_straddles_kv_heads_is_refused_here_too(
    tmp_path: Path, tp: int, dcp: int, heads: int, kv_heads: int
) -> None:
    asked = {"input": 100, "output": 10, "hardware": "GB200"}  # whose links join so many ranks
    found = plan(model=bare(tmp_path, heads=heads, kv_heads=kv_heads), gpus=tp, **asked)
    refused = {r.layout: r.why for r in found.refused}
    assert f"{kv_heads} KV heads" in refused[f"-tp {tp} -dcp {dcp}"]


def test_one_kv_head_whatever_kimis_config_says() -> None:
    found = plan(model="kimi-k2.6", hardware="GB300", input=1000, output=10)
    spread = next(p for p in found.planned if p.candidate.layout == "-tp 8 -dcp 8")
    assert spread.capacity.kv_bytes_per_token == 70272 / 8


def test_a_prompt_that_is_hardly_longer_than_a_step_takes_hardly_longer() -> None:
    """Its last tokens take a step of their own, which is as short as a step that decodes."""
    load = {"model": "Llama-3.1-8B", "hardware": "B200-SXM", "gpus": 1, "input": 8192, "concurrency": 2}
    held, over = (plan(**load, max_num_batched_tokens=n).planned[0].best.steady for n in (8400, 8192))
    assert held.ttft_s < over.ttft_s < 1.2 * held.ttft_s
