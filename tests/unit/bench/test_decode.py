"""Decoding over made-up contexts: the tokens of one rank in every layout, and figures that add up."""

import json
from pathlib import Path

import pytest

from kvspan.bench.contender import Case, Contender
from kvspan.cli.main import main
from kvspan.config.engine import EngineConfig
from kvspan.engine.build import make_executor, resolve_engine
from kvspan.engine.core import EngineCore
from kvspan.engine.engine import Engine
from kvspan.errors import ConfigError
from kvspan.request import SamplingParams
from kvspan.testing.checkpoints import write_checkpoint
from kvspan.testing.tiny import TINY

pytestmark = pytest.mark.timeout(90)
PARAMS = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=6)
SMALL = {"dtype": "float32", "kv_cache_memory": "16MiB", "max_model_len": 400, "num_threads": 1}


@pytest.fixture(scope="module", params=["llama-gqa", "deepseek-v3"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    directory: Path = tmp_path_factory.mktemp("model")
    write_checkpoint(directory, TINY[request.param], seed=5)
    return str(directory)


def decoded(model: str, **layout: object) -> list[tuple[int, ...]]:
    """Greedy tokens after prompts of which all but the last unit was made up, and never computed."""
    config = EngineConfig.from_mapping({"model": model, **SMALL, **layout})
    resolved, tokenizer = resolve_engine(config)
    executor = make_executor(resolved)
    engine = Engine(EngineCore(resolved, executor), tokenizer)
    prompts = [[3 + i] * 300 for i in range(2)]
    fills = engine.core.pretend(prompts, seed=0)
    assert fills is not None
    for fill in fills:
        executor.fill(fill)
    generations = [engine.prepare(prompt, PARAMS) for prompt in prompts]
    for generation in generations:
        engine.start(generation)
    while not all(g.finished for g in generations):
        engine.step()
        engine.core.check()
    engine.shutdown()
    hits = 300 // resolved.cache_layout.unit_tokens * resolved.cache_layout.unit_tokens
    assert [g.num_cached_tokens for g in generations] == [hits, hits]
    return [g.result().outputs[0].token_ids for g in generations]


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_a_filled_cache_decodes_alike_in_every_layout(model: str, kv_dtype: str) -> None:
    alone = decoded(model, kv_cache_dtype=kv_dtype)
    assert alone[0] != alone[1]
    for layout in (
        {"tensor_parallel_size": 2, "decode_context_parallel_size": 2},
        {"tensor_parallel_size": 4, "decode_context_parallel_size": 4},
    ):
        inprocess = {"distributed_executor_backend": "inprocess"}
        assert decoded(model, kv_cache_dtype=kv_dtype, **layout, **inprocess) == alone
    spread = {"tensor_parallel_size": 2, "decode_context_parallel_size": 2}
    assert decoded(model, kv_cache_dtype=kv_dtype, **spread) == alone  # real processes


def test_a_contender_repeats_itself_and_refuses_what_its_cache_does_not_hold(model: str) -> None:
    contender = Contender(EngineConfig.from_mapping({"model": model, **SMALL}), watched=True)
    try:
        contender.fill(Case(context=100, batch=3), num_steps=4, seed=0)
        assert len(contender.decode(4).seconds) == 4
        steps = contender.decode(4, watching=True)
        assert sum(steps.own_ms().values()) == pytest.approx(sum(steps.seconds) * 1e3 / 4)
        assert {"attention", "linear", "prepare", "sample", "engine"} <= steps.own_ms().keys()
        with pytest.raises(ConfigError, match="--kv-cache-memory"):
            contender.fill(Case(context=390, batch=400), num_steps=4, seed=9)
    finally:
        contender.shutdown()


def test_bench_decode_compares_layouts(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "found.json"
    arguments = ["bench", "decode", model, "--context", "64,100", "--batch", "2", "--steps", "3"]
    arguments += ["--kv-cache-memory", "8MiB", "--num-threads", "1", "--breakdown", "--rounds", "2"]
    layouts = ["--layout", "-tp 1", "--layout", "-tp 2 -dcp 2 --distributed-executor-backend inprocess"]
    assert main([*arguments, *layouts, "--json", str(file)]) == 0
    assert "Context 100, batch 2" in capsys.readouterr().out
    results = json.loads(file.read_text())["results"]
    assert [(r["layout"], r["context"]) for r in results] == [
        (layout, context) for context in (64, 100) for layout in layouts[1::2]
    ]
    for r in results:
        assert r["tokens_per_s"] == pytest.approx(2 / r["median_ms"] * 1e3)
        assert r["p10_ms"] <= r["median_ms"] <= r["p90_ms"]
        assert len(r["round_ms"]) == 2
        assert r["bytes_per_step"] > 0
        assert r["breakdown_ms"]["attention"] > 0
    assert results[0]["ratio"] == results[0]["worst_ratio"] == 1.0
    assert main([*arguments, "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["results"]) == 2


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--steps", "0"], "--steps 0 is too small: 1"),
        (["--context", "x"], "--context x"),
        (["--batch", "0"], "--batch 0: 0 is too small"),
        (["--cases", "64"], "--cases"),
        (["--context", "5000"], "--hf-overrides"),
        (["--context", "5000"], "--context 5000 with --steps 32 needs --max-model-len 5040; a lower"),
        (["--context", "90", "--max-model-len", "64"], "--max-model-len 130, and it is 64: leave"),
        (["--context", "90", "--kv-cache-memory", "1KiB"], "--context 90 with --steps 32 needs"),
        (["--no-enable-prefix-caching"], "--enable-prefix-caching"),
        (["--layout", "--no-such 1"], "--no-such"),
    ],
    ids=str,
)
def test_bench_decode_refuses(
    flags: list[str], told: str, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "decode", model, *flags]) == 2
    assert told in capsys.readouterr().err
