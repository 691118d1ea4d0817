"""What drawing a step's tokens costs: ours beside a sort of all logits, which torch samplers do.

    OMP_NUM_THREADS=2 python benchmarks/sampling.py --threads 2

Both get the same logits of the same rows and take turns; the medians of a step are printed, and theirs
over ours. Ours runs whole, with its numbers by hash.
"""

import argparse
import statistics
import time

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from kvspan.layers.logits import Logits
from kvspan.request import SamplingParams
from kvspan.sampling.sampler import Sampler, SamplingRow

WISHES = {
    "greedy": SamplingParams(temperature=0),
    "temperature 0.7": SamplingParams(temperature=0.7),
    "top_p 0.95": SamplingParams(temperature=0.7, top_p=0.95),
    "top_k 20, top_p 0.8": SamplingParams(temperature=0.7, top_k=20, top_p=0.8),
}
NO_TOKENS = np.zeros(0, np.int32)


def ours(logits: Tensor, rows: list[SamplingRow]) -> list[int]:
    """As a rank does it."""
    shared = Logits.of_one(logits)
    return Sampler.plain(shared, shared.best(), rows).tolist()


def by_sorting(logits: Tensor, params: SamplingParams) -> list[int]:
    """As torch samplers do it: a sort, a running sum, an exponential race."""
    if params.is_greedy:
        return logits.argmax(-1).tolist()
    scaled = logits / params.temperature
    if params.top_k > 0 or params.top_p < 1:
        ordered, places = scaled.sort(-1)
        if params.top_k > 0:
            ordered[:, : -params.top_k] = -torch.inf
        behind = ordered.softmax(-1).cumsum(-1)
        ordered[:, :-1][behind[:, :-1] <= 1 - params.top_p] = -torch.inf
        scaled = scaled.scatter(-1, places, ordered)
    chances = scaled.softmax(-1)
    return chances.div_(torch.empty_like(chances).exponential_()).argmax(-1).tolist()


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--vocab", type=int, default=49_152)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=15)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    table = Table(title=f"A step's tokens of {asked.vocab:,}, {asked.threads} threads; ms")
    for name in ("rows", "wish", "kvspan", "sorting", "times"):
        table.add_column(name, justify="left" if name == "wish" else "right")
    for batch in asked.batch:
        logits = 3 * torch.randn(batch, asked.vocab, generator=torch.Generator().manual_seed(0))
        logits[:, :40] += 9  # a few that matter, and a long tail
        for name, params in WISHES.items():
            rows = [
                SamplingRow(
                    request_id=i,
                    params=params,
                    seed=i,
                    position=i,
                    prompt_ids=NO_TOKENS,
                    output_ids=NO_TOKENS,
                    eos_token_ids=(),
                )
                for i in range(batch)
            ]
            took: tuple[list[float], list[float]] = ([], [])
            for _ in range(asked.rounds):
                start = time.perf_counter()
                ours(logits, rows)
                between = time.perf_counter()
                by_sorting(logits, params)
                took[0].append(between - start)
                took[1].append(time.perf_counter() - between)
            mine, theirs = (statistics.median(each) * 1e3 for each in took)
            table.add_row(str(batch), name, f"{mine:.2f}", f"{theirs:.2f}", f"{theirs / mine:.1f}")
    Console().print(table)


if __name__ == "__main__":
    main()
