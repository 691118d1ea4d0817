"""How long steps of models with next to nothing to compute take: what an engine does beside its work.

Steps of a bf16 model are recorded and played; those of a float32 model are not, and Python runs them. A
layer is the difference between a model of many layers and one of few.
"""

import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from kvspan.bench.contender import Case, Contender
from kvspan.config.engine import EngineConfig

FEW_LAYERS, MANY_LAYERS = 8, 40
FEW_ROWS, MANY_ROWS = 1, 16
HIDDEN_SIZE = 32
_HEAD_DIM = 64
_CONTEXT = 32
_STEPS, _ROUNDS = 32, 3
_TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN_SIZE,
    "intermediate_size": HIDDEN_SIZE,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": _HEAD_DIM,
    "vocab_size": 1024,
    "max_position_embeddings": 4096,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TinySteps:
    """What steps take by layers and rows, in microseconds.

    Args:
        step_us: of a step of one row, beside its layers.
        row_us: more for each row, beside its layers.
        layer_us: of a layer of one row.
        layer_row_us: of it, what it takes more for each row.
    """

    step_us: float
    row_us: float
    layer_us: float
    layer_row_us: float


def tiny_steps(
    num_ranks: int, *, played: bool, choices: Mapping[str, int | str] = MappingProxyType({})
) -> TinySteps:
    """Decodes with tiny models, which take turns.

    Args:
        num_ranks: T.
        played: whether steps may be played.
        choices: further options of the engine, by name.
    """
    options = {
        "load_format": "dummy",
        "dtype": "bfloat16" if played else "float32",
        "tensor_parallel_size": num_ranks,
        "max_model_len": 256,
        "max_num_seqs": MANY_ROWS,
        "kv_cache_memory": 256 << 20,
        **choices,
    }
    with _contender(FEW_LAYERS, options) as few, _contender(MANY_LAYERS, options) as many:
        (few_us, one_us), (few_rows_us, several_us) = (
            _layer_us(few, many, rows) for rows in (FEW_ROWS, MANY_ROWS)
        )
    more_rows = MANY_ROWS - FEW_ROWS
    row_us = max((few_rows_us - few_us) / more_rows, 0.0)
    return TinySteps(
        step_us=max(few_us - row_us, 0.0),
        row_us=row_us,
        layer_us=one_us,
        layer_row_us=max((several_us - one_us) / more_rows, 0.0),
    )


def _layer_us(few: Contender, many: Contender, num_rows: int) -> tuple[float, float]:
    """Microseconds of a step beside its layers, and of a layer."""
    taken: dict[str, list[float]] = {few.name: [], many.name: []}
    for contender in (few, many):
        contender.fill(Case(_CONTEXT, num_rows), num_steps=_STEPS, seed=num_rows << 32)
    for _ in range(_ROUNDS):
        for contender in (few, many):
            taken[contender.name] += contender.decode(_STEPS).seconds
    # What else runs here only slows a step, so those that few are faster than are the step itself.
    few_us, many_us = (sorted(its)[len(its) // 10] * 1e6 for its in taken.values())
    layer_us = (many_us - few_us) / (MANY_LAYERS - FEW_LAYERS)
    return few_us - FEW_LAYERS * layer_us, layer_us


@contextmanager
def _contender(num_layers: int, options: Mapping[str, int | str]) -> Iterator[Contender]:
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "config.json").write_text(json.dumps({**_TINY, "num_hidden_layers": num_layers}))
        asked = EngineConfig.from_mapping({"model": directory, **options})
        contender = Contender(asked, name=f"{num_layers} layers")
        try:
            yield contender
        finally:
            contender.shutdown()
