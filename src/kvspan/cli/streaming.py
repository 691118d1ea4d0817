"""Writes an output to stdout as it comes, with a bar for the prompt on the way to its first token."""

import sys
from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kvspan.clock import WallClock
from kvspan.engine.generation import Prompt
from kvspan.engine.llm import LLM
from kvspan.request import RequestOutput, SamplingParams


@dataclass(frozen=True, slots=True)
class Streamed:
    """What came, and how long it took.

    Args:
        result: the output.
        ttft_s: seconds until the first token.
        decode_s: seconds from the first token to the last.
        kv_tokens_by_rank: of each DCP rank before the last step, which frees them.
    """

    result: RequestOutput
    ttft_s: float
    decode_s: float
    kv_tokens_by_rank: tuple[int, ...]


def stream(llm: LLM, prompt: Prompt, params: SamplingParams, *, console: Console) -> Streamed:
    """Completes one prompt; text goes to stdout, the bar to `console` if that is a terminal."""
    clock = WallClock()
    started_s = clock.now_s()
    first_s = last_s = started_s
    held: list[int] = []
    generation = None
    with _prompt_bar(console) as bar:
        task = bar.add_task("", total=None)
        for piece in llm.stream(prompt, params):
            generation, last_s = piece.generation, clock.now_s()
            (output,) = generation.outputs.values()
            counts = llm.engine.core.kv_tokens_by_rank()
            held = counts if any(counts) else held  # with its last token a request is gone
            if output.num_tokens == 0:
                total = len(generation.prompt_ids)
                bar.update(task, total=total, completed=generation.num_computed_tokens)
                continue
            if output.num_tokens == 1:
                first_s = last_s
                bar.stop()
            sys.stdout.write(piece.text)
            sys.stdout.flush()
    assert generation is not None, "a request has at least one step"
    sys.stdout.write("\n")
    return Streamed(generation.result(), first_s - started_s, last_s - first_s, tuple(held))


def _prompt_bar(console: Console) -> Progress:
    return Progress(
        TextColumn("Reading the prompt"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("tokens"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
