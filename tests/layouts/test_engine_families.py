"""Whole engines of latent attention and experts: a layout gives one rank's text, cold and warm."""

from pathlib import Path

import pytest

from kvspan.testing.checkpoints import write_checkpoint
from kvspan.testing.tiny import KIMI, TINY
from tests.conftest import SEED
from tests.layouts.engines import engine, generate
from tests.layouts.test_engine_layouts import GREEDY, assert_same, prompts

FAMILIES = {
    "deepseek-v2-lite": TINY["deepseek-v2-lite"],
    "deepseek-v3": TINY["deepseek-v3"],
    "kimi": KIMI,
    "qwen2-moe": TINY["qwen2-moe"],
    "qwen3-moe": TINY["qwen3-moe"],
}
LENGTHS = (1, 5, 17, 118, 205)


@pytest.mark.parametrize("interleave", [None, 1])
@pytest.mark.parametrize("name", FAMILIES)
def test_four_ranks_give_the_text_of_one(name: str, interleave: int | None, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, FAMILIES[name], seed=SEED)
    with engine(tmp_path) as llm:
        wanted = generate(llm, prompts(LENGTHS), GREEDY)
    layout = {"tensor_parallel_size": 4, "decode_context_parallel_size": 4}
    options = {"cp_kv_cache_interleave_size": interleave, "enable_expert_parallel": interleave == 1}
    with engine(tmp_path, **layout, **options, max_num_batched_tokens=48, max_num_seqs=8) as llm:
        assert_same(generate(llm, prompts(LENGTHS), GREEDY), wanted)
        warm = generate(llm, prompts(LENGTHS), GREEDY)
        assert_same(warm, wanted)
        unit = llm.engine.core.plan.hit_unit
        assert [g.num_cached_tokens for g in warm] == [(n - 1) // unit * unit for n in LENGTHS]
