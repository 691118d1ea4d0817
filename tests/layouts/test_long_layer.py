"""A layer of latent attention over a long context: 8 ranks give what a float64 stream over it gives."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from kvspan.config.engine import EngineConfig
from kvspan.config.resolved import Resolved
from kvspan.engine.build import resolve_engine
from kvspan.testing.long_layer import spread_outputs, streamed_output
from kvspan.testing.tiny import TINY


def one_layer(directory: Path, **options: object) -> Resolved:
    config = TINY["deepseek-v3"] | {"num_hidden_layers": 1, "first_k_dense_replace": 1}
    (directory / "config.json").write_text(json.dumps(config))
    asked = {"model": str(directory), "load_format": "dummy", "num_threads": 1, **options}
    asked["hf_overrides"] = json.dumps({"max_position_embeddings": 1 << 20})
    return resolve_engine(EngineConfig.from_mapping(asked))[0]


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("num_keys", "ranks", "options", "bound"),
    [
        (1000, 4, {"dtype": "float32"}, 1e-4),
        (1003, 8, {"dtype": "float32", "cp_kv_cache_interleave_size": 1}, 1e-4),
        pytest.param(20_000, 8, {"dtype": "bfloat16"}, 2e-2, marks=pytest.mark.slow),
        pytest.param(20_000, 8, {"dtype": "float32"}, 1e-4, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_ranks_equal_a_stream_in_float64_and_each_of_them_counts(
    num_keys: int, ranks: int, options: dict[str, object], bound: float, tmp_path: Path
) -> None:
    layout = {"tensor_parallel_size": ranks, "decode_context_parallel_size": ranks}
    resolved = one_layer(tmp_path, **layout, **options)
    x = torch.randn(resolved.model_config.hidden_size, generator=torch.Generator().manual_seed(1))
    x = x.bfloat16().float()
    whole, *without = spread_outputs(resolved, x, num_keys=num_keys, seed=4, timeout_s=100)
    wanted = streamed_output(resolved, x, num_keys=num_keys, seed=4)
    scale = np.abs(wanted).max()
    assert np.abs(whole.double().numpy() - wanted).max() / scale < bound
    for rank, output in enumerate(without):
        assert np.abs(output.double().numpy() - wanted).max() / scale > 2 * bound, f"rank {rank}"
