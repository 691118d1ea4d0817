"""`check` on tiny models: a right layout is equal, a broken one is found."""

from pathlib import Path

import pytest

from kvspan.attention import exchange
from kvspan.attention.merge import weighted_sum
from kvspan.check.run import Stage, check
from kvspan.config.engine import EngineConfig
from kvspan.testing.checkpoints import write_checkpoint
from kvspan.testing.tiny import TINY


def asked(model: Path, **options: object) -> EngineConfig:
    layout = {"tensor_parallel_size": 2, "decode_context_parallel_size": 2}
    runtime = {"distributed_executor_backend": "inprocess", "num_threads": 1, "max_model_len": 160}
    return EngineConfig.from_mapping({"model": str(model), **layout, **runtime, **options})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    write_checkpoint(directory, TINY["llama-gqa-9x3"], seed=2)
    return directory


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_layout_is_equal(model: Path, dtype: str) -> None:
    verdict = check(asked(model, dtype=dtype))
    assert verdict.holds
    assert verdict.prompt_lengths == (1, 5, 32, 33, 129) * 8
    assert [run.name for run in verdict.exact] == [
        "prefix cache cold",
        "prefix cache warm",
        "chunks of 49",
    ]
    assert len(verdict.narrow) == (0 if dtype == "float32" else 3)


@pytest.mark.parametrize(("dtype", "num_runs"), [("float32", 3), ("bfloat16", 6)])
def test_it_says_what_runs_and_how_much_is_left(model: Path, dtype: str, num_runs: int) -> None:
    told: list[Stage] = []
    check(asked(model, dtype=dtype), told=told.append)
    assert [stage.run for stage in told] == [run for run in range(1, num_runs + 1) for _ in range(2)]
    assert {stage.num_runs for stage in told} == {num_runs}
    assert [stage.num_prompts for stage in told] == [None, 40] * num_runs
    assert told[0].what == "float32, one rank"
    assert told[-1].what == f"{dtype}, the layout in chunks of 49"


def test_a_directory_with_only_a_config(tmp_path: Path, model: Path) -> None:
    (tmp_path / "config.json").write_text((model / "config.json").read_text())
    assert check(asked(tmp_path, load_format="dummy", dtype="float32")).holds


def test_a_broken_merge_is_found(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Averages the shards instead of weighing them: wrong wherever two shards hold keys."""

    def average(out, weights):  # type: ignore[no-untyped-def]
        return weighted_sum(out, (weights > 0).float() / max(len(weights), 1))

    monkeypatch.setattr(exchange, "weighted_sum", average)
    verdict = check(asked(model, dtype="float32"))
    assert not verdict.holds
    assert any(run.different or run.worst > 1e-3 for run in verdict.exact)
