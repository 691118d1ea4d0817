"""Resident memory of an engine at 1, 2 and 4 ranks, beside its weights and its KV budget.

    python benchmarks/memory.py smollm2-135m --ranks 1,2,4

Each number of ranks has a process of its own. Counted (as PSS: a shared page once) are the driver, the
fork-server and all ranks, when all weights are loaded, the whole KV cache is written, and a prompt of
2,000 tokens has been computed and continued. The bound: weights + KV budget + 350 MB a rank.
"""

import argparse
import json
import subprocess
import sys

from kvspan.bench.contender import Case, Contender
from kvspan.config.engine import EngineConfig
from kvspan.testing.memory import tree_pss_bytes

MOST_BYTES_A_RANK = 350_000_000
PROMPT_TOKENS = 2000


def measure(model: str, ranks: int, kv_bytes: int) -> dict[str, object]:
    """One engine, in this process and its children."""
    options = {"model": model, "tensor_parallel_size": ranks, "decode_context_parallel_size": ranks}
    options |= {"kv_cache_memory": f"{kv_bytes // ranks}b", "max_model_len": PROMPT_TOKENS + 64}
    contender = Contender(EngineConfig.from_mapping(options))
    try:
        contender.compute(list(range(100, 100 + PROMPT_TOKENS)))
        plan = contender.core.plan
        context = PROMPT_TOKENS
        contender.fill(Case(context, plan.tokens_total // (context + 64)), num_steps=8, seed=1)
        contender.decode(2)
        used = tree_pss_bytes()
        weights = sum(report.weight_bytes for report in contender.core.reports)
        beyond = used - weights - plan.bytes_per_rank * ranks
    finally:
        contender.shutdown()
    return {
        "ranks": ranks,
        "pss_mb": round(used / 1e6),
        "weights_mb": round(weights / 1e6),
        "kv_mb": round(plan.bytes_per_rank * ranks / 1e6),
        "beyond_mb_a_rank": round(beyond / ranks / 1e6),
        "within": beyond <= ranks * MOST_BYTES_A_RANK,
    }


def main() -> None:
    """Prints a JSON line for each number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--ranks", default="1,2,4")
    parser.add_argument("--kv-bytes", type=int, default=512 << 20, help="of all ranks together")
    asked = parser.parse_args()
    if "," not in asked.ranks:
        print(json.dumps(measure(asked.model, int(asked.ranks), asked.kv_bytes)), flush=True)
        return
    for ranks in asked.ranks.split(","):
        mine = [asked.model, "--ranks", ranks, "--kv-bytes", str(asked.kv_bytes)]
        subprocess.run([sys.executable, __file__, *mine], check=True)


if __name__ == "__main__":
    main()
