"""A cache of 8 bits: near the exact one by a stated bound, alike in every layout, and twice as roomy."""

from pathlib import Path

import pytest
import torch

from kvspan.loading.resolve import resolve
from kvspan.testing.checkpoints import write_checkpoint
from kvspan.testing.forward import ForwardCase, forward
from kvspan.testing.tiny import TINY, RawConfig, tiny_deepseek_v3, tiny_llama
from kvspan.topology import Topology
from tests.conftest import SEED
from tests.layouts.engines import engine
from tests.layouts.forwards import random_prompts
from tests.layouts.test_forward_layouts import LENGTHS

MODELS = {
    "llama-gqa-9x3": TINY["llama-gqa-9x3"],
    # No experts: another expert for a token is a jump, and says nothing of the cache.
    "deepseek-dense": tiny_deepseek_v3(first_k_dense_replace=3),
}
BOUNDS = {torch.int8: 0.02, torch.float8_e4m3fn: 0.05}
"""Of the mean difference of a log-probability, on models whose log-probabilities spread over units."""
BETWEEN_LAYOUTS = 1e-3
"""Of the same between layouts: rounding in float32 may tip an element to the next of its 255 values."""
TOPOLOGIES = [Topology(tp_size=3), Topology(tp_size=2, dcp_size=2), Topology(tp_size=4, dcp_size=4)]


def mean_difference(some: list[torch.Tensor], others: list[torch.Tensor]) -> float:
    pairs = zip(some, others, strict=True)
    return torch.cat([(a.log_softmax(-1) - b.log_softmax(-1)).abs() for a, b in pairs]).mean().item()


@pytest.mark.parametrize("kv_dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_near_those_of_an_exact_cache(
    name: str, kv_dtype: torch.dtype, tmp_path: Path
) -> None:
    write_checkpoint(tmp_path, MODELS[name], seed=SEED)
    checkpoint = resolve(str(tmp_path))
    exact = forward(checkpoint, random_prompts(LENGTHS), ForwardCase()).logits
    one_rank = forward(checkpoint, random_prompts(LENGTHS), ForwardCase(kv_dtype=kv_dtype)).logits
    assert 1e-3 < mean_difference(one_rank, exact) < BOUNDS[kv_dtype]
    for topology in TOPOLOGIES:
        case = ForwardCase(topology=topology, interleave=4, chunk=17, kv_dtype=kv_dtype)
        got = forward(checkpoint, random_prompts(LENGTHS), case).logits
        assert mean_difference(got, one_rank) < BETWEEN_LAYOUTS


@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "int8"])
@pytest.mark.parametrize(
    "raw",
    [tiny_llama(head_dim=64), tiny_deepseek_v3(kv_lora_rank=96, qk_rope_head_dim=32)],
    ids=["llama", "deepseek"],
)
def test_the_capacity_nearly_doubles(raw: RawConfig, kv_cache_dtype: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, raw, seed=SEED)
    layout = {"tensor_parallel_size": 2, "decode_context_parallel_size": 2}
    tokens = {}
    for dtype in ("bfloat16", kv_cache_dtype):
        with engine(tmp_path, **layout, kv_cache_dtype=dtype) as llm:
            tokens[dtype] = llm.engine.core.plan.tokens_total
            assert len(llm.generate([[5, 6, 7]])[0].outputs[0].token_ids) > 0
    assert 1.9 < tokens[kv_cache_dtype] / tokens["bfloat16"] <= 2.0
