"""What start-up prints of choices: under their flags, or under names that the docs tell of."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from kvspan.cli.startup import print_choices
from kvspan.config.engine import ENGINE_OPTIONS, EngineConfig
from kvspan.config.resolved import Resolved
from kvspan.cost.choose import Machine, resolve
from kvspan.plan.models import find_model

DOCS = Path(__file__).parents[3] / "docs" / "serving.md"
COORDINATES = {"prefill_context_parallel_size": 2, "decode_context_parallel_size": 2}
RANKS = {"tensor_parallel_size": 2, "decode_context_parallel_size": 2}
FLAGS = {option.flag for option in ENGINE_OPTIONS}


def resolved_of(model: str, options: dict[str, object]) -> Resolved:
    asked = EngineConfig.from_mapping({"model": model, **options})
    return resolve(asked, find_model(model).config, Machine(cores=2))


def printed(resolved: Resolved) -> list[str]:
    """The choices, each on one line however it is folded."""
    whole = text_of(resolved).replace("\n      ", " ")
    return [line[2:] for line in whole.splitlines() if line.startswith("  ")]


def text_of(resolved: Resolved) -> str:
    file = io.StringIO()
    print_choices(Console(file=file, soft_wrap=True), resolved)
    return file.getvalue()


@pytest.mark.parametrize("model", ["SmolLM2-135M", "DeepSeek-R1"])
@pytest.mark.parametrize("layout", [{}, COORDINATES, RANKS], ids=["one", "coordinates", "ranks"])
@pytest.mark.parametrize("mode", ["static", "elastic"])
def test_each_line_has_a_flag_or_is_in_the_docs(
    model: str, layout: dict[str, object], mode: str
) -> None:
    resolved = resolved_of(model, layout | ({"dcp_mode": mode} if layout else {}))
    table = DOCS.read_text()
    names = [line.split(":")[0].split()[0] for line in printed(resolved)]
    assert len(names) == len(resolved.why) + len(resolved.notes)
    for name in set(names) - {"note"}:
        assert name in FLAGS or f"\n| `{name}` | " in table


@pytest.mark.parametrize("model", ["SmolLM2-135M", "DeepSeek-R1"])
def test_no_line_is_longer_than_a_terminal(model: str) -> None:
    resolved = resolved_of(model, {**COORDINATES, "dcp_mode": "elastic"})
    assert max(len(f"  {line}") for line in printed(resolved)) > 120
    assert max(map(len, text_of(resolved).splitlines())) <= 120
    assert all(
        why.split() == line.split()[-len(why.split()) :]
        for line, why in zip(printed(resolved), resolved.why.values(), strict=False)
    )


@pytest.mark.parametrize("layout", [COORDINATES, RANKS], ids=["coordinates", "ranks"])
def test_a_choice_under_a_flag_is_in_words_that_the_flag_takes(layout: dict[str, object]) -> None:
    (line,) = [
        each for each in printed(resolved_of("SmolLM2-135M", layout)) if "--prefill-strategy" in each
    ]
    word = line.split()[1].rstrip(":")
    assert EngineConfig.from_mapping({"model": "x", "prefill_strategy": word}).prefill_strategy == word


def test_values_are_spelled_for_readers() -> None:
    lines = printed(resolved_of("SmolLM2-135M", {**COORDINATES, "dcp_mode": "elastic"}))
    starts = [line.split(":")[0] for line in lines]
    assert "--dcp-q-replicate on" in starts
    assert "--gpu-memory-utilization 0.4" in starts
    assert "meet_tokens 2" in starts
    assert any(start.startswith("team_rows 1 to ") for start in starts)
