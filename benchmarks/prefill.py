"""Time to the first token of one long prompt, layout beside layout.

    python benchmarks/prefill.py                    both cases, with their bounds
    python benchmarks/prefill.py small-mla
    python benchmarks/prefill.py --model smollm2-135m --prompt-tokens 8000 --layouts "-tp 1; -pcp 2"

Every layout runs in ranks of one thread, and at each chunk size (`--max-num-batched-tokens`); rounds of
all of them are interleaved, and a layout is judged by the median at its best chunk size. Two ranks that
share rows are to take at most 0.62 of one rank's time, and 0.95 of that of two which share matrices; the
command exits with 1 if they do not. `--json` writes every time.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
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
MODELS = Path(__file__).parent / "models"
OF_ONE_RANK, OF_TENSOR_PARALLEL = 0.62, 0.95
"""Bounds on the time of two PCP ranks."""


@dataclass(frozen=True)
class Case:
    """A prompt, and who computes it.

    Args:
        model: as the engine names it.
        prompt_tokens: of the prompt.
        layouts: as a user types them; the first is what others are compared with.
        chunks: tokens of a step, each tried.
        load_format: of the weights.
    """

    model: str
    prompt_tokens: int
    layouts: tuple[str, ...]
    chunks: tuple[int, ...]
    load_format: str = "auto"


CASES = {
    "smollm2": Case(
        "smollm2-135m",
        8_000,
        ("-tp 1", "-pcp 2", "-pcp 2 -dcp 2", "-tp 2 -dcp 2"),
        (1024, 2048),
    ),
    "small-mla": Case(
        str(MODELS / "small-mla"),
        32_000,
        ("-tp 1", "-pcp 2", "-pcp 2 -dcp 2", "-tp 2", "-tp 2 -dcp 2"),
        (8192, 32_000),
        "dummy",
    ),
}


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

    @property
    def median_s(self) -> float:
        """Of the rounds."""
        return statistics.median(self.ttft_s)


def main() -> int:
    """Measures and prints."""
    args = _arguments()
    met, rows = True, []
    for case in _cases(args):
        contenders = _measured(case, args)
        met &= _print(_best(contenders), case)
        model = Path(case.model).name
        rows += [
            {"model": model, "layout": c.layout, "chunk": c.chunk, "ttft_s": c.ttft_s}
            for c in contenders
        ]
    if args.json:
        Path(args.json).write_text(json.dumps(rows, indent=1))
    return 0 if met else 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("case", nargs="*", help="of the table; both if none is named")
    parser.add_argument("--model", help="another one")
    parser.add_argument("--prompt-tokens", type=int, default=8000, help="with --model")
    parser.add_argument("--layouts", default="-tp 1; -pcp 2; -tp 2 -dcp 2", help="with --model; by ;")
    parser.add_argument("--load-format", default="auto", help="with --model")
    parser.add_argument("--chunks", type=int, nargs="+", help="tokens of a step, instead of the case's")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kv-cache-memory", default="1GiB")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", help="a file for every time")
    return parser.parse_args()


def _cases(args: argparse.Namespace) -> list[Case]:
    if unknown := [name for name in args.case if name not in CASES]:
        raise SystemExit(f"No case {unknown[0]}: there are {', '.join(CASES)}.")
    if args.model is None:
        return [CASES[name] for name in args.case or CASES]
    layouts = tuple(text.strip() for text in args.layouts.split(";"))
    return [Case(args.model, args.prompt_tokens, layouts, (2048,), args.load_format)]


def _measured(case: Case, args: argparse.Namespace) -> list[Contender]:
    """All layouts at all chunk sizes, by turns."""
    prompt = np.random.default_rng(args.seed).integers(100, 20_000, case.prompt_tokens).tolist()
    with ExitStack() as stack:
        contenders = [
            Contender(layout, chunk, stack.enter_context(_engine(case, layout, chunk, args)))
            for layout in case.layouts
            for chunk in args.chunks or case.chunks
        ]
        for _ in track(range(args.rounds), "Rounds", console=Console(stderr=True), transient=True):
            for contender in contenders:
                contender.run(prompt)
    return contenders


def _engine(case: Case, layout: str, chunk: int, args: argparse.Namespace) -> LLM:
    parser = FlagParser()
    add_engine_flags(parser)
    defaults = {
        "model": case.model,
        "max_num_batched_tokens": chunk,
        "max_model_len": case.prompt_tokens + 16,
        "num_threads": 1,
        "enable_prefix_caching": False,
        "kv_cache_memory": args.kv_cache_memory,
        "load_format": case.load_format,
    }
    return LLM.from_config(engine_config(parser.parse_args(layout.split()), defaults=defaults))


def _best(contenders: Sequence[Contender]) -> dict[str, Contender]:
    """Of each layout the chunk size with the lowest median."""
    best: dict[str, Contender] = {}
    for c in contenders:
        known = best.setdefault(c.layout, c)
        if c.median_s < known.median_s:
            best[c.layout] = c
    return best


def _print(best: dict[str, Contender], case: Case) -> bool:
    """The table, and whether the bounds are met; where there is nothing to compare, they are."""
    first = best[case.layouts[0]]
    table = Table(
        title=f"TTFT of {case.prompt_tokens:,} tokens, {Path(case.model).name}, 1 thread a rank"
    )
    for name in ("layout", "chunk", "TTFT s", "prompt tok/s", f"times {first.layout}"):
        table.add_column(name, justify="left" if name == "layout" else "right")
    for c in best.values():
        rate = case.prompt_tokens / c.median_s
        ratio = f"{c.median_s / first.median_s:.3f}"
        table.add_row(c.layout, str(c.chunk), f"{c.median_s:.2f}", f"{rate:,.0f}", ratio)
    Console().print(table)
    pcp = _fastest(best, "-pcp 2")
    bounds = ((_fastest(best, "-tp 1"), OF_ONE_RANK), (_fastest(best, "-tp 2"), OF_TENSOR_PARALLEL))
    met = [_meets(pcp, other, bound) for other, bound in bounds if pcp and other]  # prints each
    return all(met)


def _fastest(best: dict[str, Contender], flag: str) -> Contender | None:
    """Of the layouts that begin with a flag."""
    named = [c for layout, c in best.items() if layout.startswith(flag)]
    return min(named, key=lambda c: c.median_s, default=None)


def _meets(mine: Contender, other: Contender, bound: float) -> bool:
    by_round = [a / b for a, b in zip(mine.ttft_s, other.ttft_s, strict=True)]
    ratio = mine.median_s / other.median_s
    rounds = " ".join(f"{each:.3f}" for each in by_round)
    verdict = "met" if ratio <= bound else "missed"
    print(f"{mine.layout} / {other.layout}: {ratio:.3f} ({rounds}), bound {bound}: {verdict}")
    return ratio <= bound


if __name__ == "__main__":
    sys.exit(main())
