"""One sequence of a million tokens on 8 ranks, each with room for 140,000; and one rank that refuses it.

    python benchmarks/million.py                 about 3 minutes on 2 cores, and 13 GB
    python benchmarks/million.py --tokens 20000 --room 2800

Dummy weights of benchmarks/models/long-mla, whose positions `--hf-overrides` raises; the keys are made
up, seeded and different at every position. Three parts: what one rank says; a layer of 8 ranks beside a
float64 stream over the same keys, and without each rank's shard; steps of the whole engine.
"""

import argparse
import json
import sys
from functools import partial
from pathlib import Path

import numpy as np
import torch

from kvspan.bench.bandwidth import ReadBandwidth
from kvspan.bench.contender import Case
from kvspan.bench.decode import Decoded, Plan, measure
from kvspan.config.engine import EngineConfig
from kvspan.engine.build import make_executor, resolve_engine
from kvspan.engine.core import EngineCore
from kvspan.errors import ConfigError
from kvspan.testing.long_layer import spread_outputs, streamed_output

MODEL = Path(__file__).parent / "models" / "long-mla"
SEED = 11
TIMEOUT_S = 1200.0


def config(asked: argparse.Namespace, ranks: int, *, layers: int) -> EngineConfig:
    """What runs: the whole model, or a part of its layers, on some ranks with the same budget each."""
    overrides = {"max_position_embeddings": asked.tokens + 1024, "num_hidden_layers": layers}
    token_bytes = layers * 576 * 2
    return EngineConfig.from_mapping(
        {
            "model": str(MODEL),
            "load_format": "dummy",
            "hf_overrides": json.dumps(overrides | {"first_k_dense_replace": layers}),
            "tensor_parallel_size": ranks,
            "decode_context_parallel_size": ranks,
            "num_threads": 1,
            "kv_cache_memory": f"{asked.room * token_bytes}b",
            "max_model_len": asked.tokens + asked.steps + 16,
            "max_num_seqs": 1,
            "step_timeout": TIMEOUT_S,
        }
    )


def refused(asked: argparse.Namespace) -> str:
    """What one rank with the budget of one of the eight says."""
    resolved, _ = resolve_engine(config(asked, 1, layers=8))
    try:
        EngineCore(resolved, make_executor(resolved)).shutdown()
    except ConfigError as error:
        return str(error)
    raise AssertionError("one rank took what is for eight")


def checked(asked: argparse.Namespace) -> dict[str, object]:
    """A layer's output beside the float64 stream: errors relative to the largest element."""
    resolved, _ = resolve_engine(config(asked, asked.ranks, layers=1))
    size = resolved.model_config.hidden_size
    x = torch.randn(size, generator=torch.Generator().manual_seed(SEED)).bfloat16().float()
    given = {"num_keys": asked.tokens, "seed": SEED}
    whole, *without = spread_outputs(resolved, x, **given, timeout_s=TIMEOUT_S)
    wanted = streamed_output(resolved, x, **given)
    scale = np.abs(wanted).max()
    errors = [float(np.abs(o.double().numpy() - wanted).max() / scale) for o in (whole, *without)]
    return {"error": errors[0], "error_without_rank": errors[1:]}


def stepped(asked: argparse.Namespace) -> Decoded:
    """Steps of the whole engine."""
    plan = Plan((Case(asked.tokens, 1),), asked.steps, num_rounds=1, seed=SEED)
    layouts = [("", config(asked, asked.ranks, layers=8))]
    ((decoded,),) = measure(layouts, plan, told=partial(print, file=sys.stderr, flush=True))
    return decoded


def main() -> None:
    """Runs the parts that were asked for and prints a JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--room", type=int, default=140_000, help="tokens that a rank's budget holds")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--parts", default="refuse,layer,decode")
    asked = parser.parse_args()
    found: dict[str, object] = {"tokens": asked.tokens, "ranks": asked.ranks, "room": asked.room}
    if "refuse" in asked.parts:
        found["one_rank"] = refused(asked)
    if "layer" in asked.parts:
        found["layer"] = checked(asked)
    if "decode" in asked.parts:
        cores = torch.get_num_threads()
        decoded = stepped(asked)
        bandwidth = ReadBandwidth(cores).measure()
        found["decode"] = {
            "ms_a_step": decoded.median_ms,
            "gigabytes_a_step": decoded.bytes_per_step / 1e9,
            "gigabytes_a_second": decoded.bytes_per_step / decoded.median_ms / 1e6,
            "memory_gigabytes_a_second": bandwidth / 1e9,
            "share": decoded.bytes_per_step / decoded.median_ms * 1e3 / bandwidth,
        }
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
