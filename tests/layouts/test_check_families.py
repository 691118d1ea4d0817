"""`kvspan check` of every family on four ranks: what a user runs before trusting a layout."""

from pathlib import Path

import pytest

from kvspan.check.run import check
from kvspan.config.engine import EngineConfig
from kvspan.testing.checkpoints import write_checkpoint
from kvspan.testing.tiny import KIMI, TINY, tiny_deepseek_v3
from tests.conftest import SEED

FAMILIES = {
    **{name: TINY[name] for name in ("llama-gqa", "qwen2", "qwen3", "qwen2-moe", "qwen3-moe")},
    **{name: TINY[name] for name in ("deepseek-v2-groups", "deepseek-v2-lite", "deepseek-v3")},
    "kimi-k2": tiny_deepseek_v3(heads=4, n_group=1, topk_group=1),
    "kimi-k2.5": KIMI,
}


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["auto", "allgather_kv"])
@pytest.mark.parametrize("name", FAMILIES)
def test_four_ranks_are_equal_to_one(name: str, strategy: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, FAMILIES[name], seed=SEED)
    verdict = check(
        EngineConfig.from_mapping(
            {
                "model": str(tmp_path),
                "tensor_parallel_size": 4,
                "decode_context_parallel_size": 4,
                "prefill_strategy": strategy,
                "dtype": "float32",
                "distributed_executor_backend": "inprocess",
                "num_threads": 1,
            }
        )
    )
    assert verdict.holds, verdict
    assert verdict.prompt_lengths[-1] == 2000
