"""Small engines on thread ranks, and requests that are watched step by step."""

from collections.abc import Callable, Sequence
from pathlib import Path

from kvspan import LLM, SamplingParams
from kvspan.engine.engine import Generation


def engine(model: Path, **options: object) -> LLM:
    """An engine whose ranks are threads, in float32.

    Args:
        model: directory of a checkpoint.
        options: of the engine; they win.
    """
    defaults = {
        "dtype": "float32",
        "distributed_executor_backend": "inprocess",
        "kv_cache_memory": "32MiB",
        "max_model_len": 512,
        "num_threads": 1,
    }
    return LLM(str(model), **{**defaults, **options})


def generate(
    llm: LLM,
    prompts: Sequence[list[int]],
    params: SamplingParams,
    *,
    looked: Callable[[Sequence[Generation]], None] = lambda _: None,
) -> list[Generation]:
    """Runs prompts together and recounts every invariant after each step.

    Args:
        llm: the engine.
        prompts: token ids.
        params: of all.
        looked: called with all of them after each step.
    """
    generations = [llm.engine.prepare(prompt, params) for prompt in prompts]
    for generation in generations:
        llm.engine.start(generation)
    while llm.engine.has_work:
        llm.engine.step()
        llm.engine.core.check()
        looked(generations)
    return generations
