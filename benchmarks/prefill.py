"""Time to the first token of one long prompt, layout beside layout.

    python benchmarks/prefill.py smollm2-135m --prompt-tokens 8000 --layouts "-tp 1; -pcp 2"

Every layout runs in ranks of one thread, and at each chunk size (`--max-num-batched-tokens`); rounds of
all of them are interleaved, and a layout is judged by the median at its best chunk size. Prints the
ratio to the first layout; `--json` writes every time.
"""

import argparse
import json
import statistics
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from kvspan import LLM, SamplingParams
from kvspan.cli.flags import FlagParser, add_engine_flags, engine_config

ONE_TOKEN = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)


@dataclass
class Contender:
    """One layout at one chunk size.

    Args:
        layout: as a user types it.
        chunk: tokens of a step.
        llm: the engine, kept for all rounds; its ranks sleep while others run.
        ttft_s: seconds to the first token, one a round.
    """

    layout: str
    chunk: int
    llm: LLM
    ttft_s: list[float] = field(default_factory=list)

    def run(self, prompt: list[int]) -> None:
        """One round."""
        started = time.perf_counter()
        self.llm.generate([prompt], ONE_TOKEN, use_tqdm=False)
        self.ttft_s.append(time.perf_counter() - started)


def main() -> None:
    """Measures and prints."""
    args = _arguments()
    prompt = np.random.default_rng(args.seed).integers(100, 20_000, args.prompt_tokens).tolist()
    with ExitStack() as stack:
        contenders = [
            Contender(layout, chunk, stack.enter_context(_engine(args, layout, chunk)))
            for layout in (text.strip() for text in args.layouts.split(";"))
            for chunk in args.chunks
        ]
        for _ in track(range(args.rounds), "Rounds", console=Console(stderr=True), transient=True):
            for contender in contenders:
                contender.run(prompt)
    best = _best(contenders)
    _print(best, args.prompt_tokens)
    if args.json:
        rows = [{"layout": c.layout, "chunk": c.chunk, "ttft_s": c.ttft_s} for c in contenders]
        Path(args.json).write_text(json.dumps(rows, indent=1))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--prompt-tokens", type=int, default=8000)
    parser.add_argument("--layouts", default="-tp 1; -pcp 2; -tp 2 -dcp 2", help="separated by ;")
    parser.add_argument("--chunks", type=int, nargs="+", default=[2048], help="tokens of a step")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--kv-cache-memory", default="1GiB")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", help="a file for every time")
    return parser.parse_args()


def _engine(args: argparse.Namespace, layout: str, chunk: int) -> LLM:
    parser = FlagParser()
    add_engine_flags(parser)
    defaults = {
        "model": args.model,
        "max_num_batched_tokens": chunk,
        "max_model_len": args.prompt_tokens + 16,
        "num_threads": 1,
        "enable_prefix_caching": False,
        "kv_cache_memory": args.kv_cache_memory,
        "load_format": args.load_format,
    }
    return LLM.from_config(engine_config(parser.parse_args(layout.split()), defaults=defaults))


def _best(contenders: list[Contender]) -> list[Contender]:
    """Of each layout the chunk size with the lowest median."""
    best: dict[str, Contender] = {}
    for c in contenders:
        known = best.setdefault(c.layout, c)
        if statistics.median(c.ttft_s) < statistics.median(known.ttft_s):
            best[c.layout] = c
    return list(best.values())


def _print(best: list[Contender], prompt_tokens: int) -> None:
    first = statistics.median(best[0].ttft_s)
    table = Table(title=f"TTFT of {prompt_tokens:,} prompt tokens, ranks of one thread")
    for name in ("layout", "chunk", "TTFT s", "prompt tok/s", f"times {best[0].layout}"):
        table.add_column(name, justify="left" if name == "layout" else "right")
    for c in best:
        median = statistics.median(c.ttft_s)
        rate = prompt_tokens / median
        table.add_row(c.layout, str(c.chunk), f"{median:.2f}", f"{rate:,.0f}", f"{median / first:.3f}")
    Console().print(table)


if __name__ == "__main__":
    main()
