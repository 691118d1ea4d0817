"""What an engine does beside its work: steps of models of which all that counts is known.

    few, many   layers, and between them weights of equal bytes: the difference is layers
    twice       as many layers as few, of twice the bytes: the difference is reading and multiplying
    few         without its layers and without its reading: the step itself

Steps of a bf16 model are recorded and played; those of a float32 model are not, and Python runs them.
Weights are read past every cache, as in any step: what schedules, prepares and samples then finds little
of what it left there, and takes two to three times as long as beside a model that fits a cache.
"""

import json
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from kvspan.bench.contender import Case, Contender
from kvspan.config.engine import EngineConfig

FEW_LAYERS, MANY_LAYERS = 8, 40
FEW_ROWS, MANY_ROWS = 1, 16
HIDDEN_SIZE = 128
_NUM_HEADS, _NUM_KV_HEADS, _HEAD_DIM = 4, 2, 64
_ATTENTION_PARAMS = HIDDEN_SIZE * _HEAD_DIM * 2 * (_NUM_HEADS + _NUM_KV_HEADS)
"""Of a layer: queries and outputs, keys and values."""
WEIGHT_BYTES = 64 << 20
"""Of all layers together, if they are loaded: twice the last cache of a server's core complex."""
_CONTEXT = 32
_STEPS, _ROUNDS = 6, 11
"""Short rounds: memory that others use as well is fast and slow by the second."""
_TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN_SIZE,
    "num_attention_heads": _NUM_HEADS,
    "num_key_value_heads": _NUM_KV_HEADS,
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
    """Decodes with models that take turns.

    Args:
        num_ranks: T.
        played: whether steps may be played.
        choices: further options of the engine, by name.
    """
    shapes = {
        "few": (FEW_LAYERS, WEIGHT_BYTES),
        "many": (MANY_LAYERS, WEIGHT_BYTES),
        "twice": (FEW_LAYERS, 2 * WEIGHT_BYTES),
    }
    with _contenders(shapes, num_ranks, played=played, choices=choices) as contenders:
        (one_us, layer_us), (several_us, layer_of_several_us) = (
            _step_and_layer_us(contenders, rows) for rows in (FEW_ROWS, MANY_ROWS)
        )
    more_rows = MANY_ROWS - FEW_ROWS
    row_us = max((several_us - one_us) / more_rows, 0.0)
    return TinySteps(
        step_us=max(one_us - row_us, 0.0),
        row_us=row_us,
        layer_us=max(layer_us, 0.0),
        layer_row_us=max((layer_of_several_us - layer_us) / more_rows, 0.0),
    )


def bare_layer_us(
    num_ranks: int, *, played: bool, choices: Mapping[str, int | str] = MappingProxyType({})
) -> float:
    """Microseconds of a layer of one row with next to nothing to read: its operators and meetings.

    Args:
        num_ranks: T.
        played: whether steps may be played.
        choices: further options of the engine, by name.
    """
    shapes = {"few": (FEW_LAYERS, 0), "many": (MANY_LAYERS, 0)}
    with _contenders(shapes, num_ranks, played=played, choices=choices) as contenders:
        return statistics.median(map(_layer_us, _rounds_us(contenders, FEW_ROWS)))


def _step_and_layer_us(contenders: Sequence[Contender], num_rows: int) -> tuple[float, float]:
    """Microseconds of a step beside its layers and what they read, and of a layer beside that."""
    layers, beside = [], []
    for its in _rounds_us(contenders, num_rows):
        layers.append(_layer_us(its))
        beside.append(its["few"] - FEW_LAYERS * layers[-1] - (its["twice"] - its["few"]))
    return statistics.median(beside), statistics.median(layers)


def _layer_us(step_us: Mapping[str, float]) -> float:
    return (step_us["many"] - step_us["few"]) / (MANY_LAYERS - FEW_LAYERS)


def _rounds_us(contenders: Sequence[Contender], num_rows: int) -> list[dict[str, float]]:
    """The median step of each in each round, by name: what is compared ran within a moment."""
    for contender in contenders:
        contender.fill(Case(_CONTEXT, num_rows), num_steps=_STEPS, seed=num_rows << 32)
    return [
        {each.name: statistics.median(each.decode(_STEPS).seconds) * 1e6 for each in contenders}
        for _ in range(_ROUNDS)
    ]


@contextmanager
def _contenders(
    shapes: Mapping[str, tuple[int, int]],
    num_ranks: int,
    *,
    played: bool,
    choices: Mapping[str, int | str],
) -> Iterator[list[Contender]]:
    """Engines of models by layers and bytes of weights (of bf16), while this lasts."""
    options = {
        "load_format": "dummy",
        "dtype": "bfloat16" if played else "float32",
        "tensor_parallel_size": num_ranks,
        "max_model_len": 256,
        "max_num_seqs": MANY_ROWS,
        "kv_cache_memory": 256 << 20,
        **choices,
    }
    running: list[Contender] = []
    try:
        with tempfile.TemporaryDirectory() as directory:
            for name, (num_layers, weight_bytes) in shapes.items():
                model = Path(directory, name)
                model.mkdir()
                (model / "config.json").write_text(json.dumps(_config(num_layers, weight_bytes)))
                asked = EngineConfig.from_mapping({"model": str(model), **options})
                running.append(Contender(asked, name=name))
            yield running
    finally:
        for contender in running:
            contender.shutdown()


def _config(num_layers: int, weight_bytes: int) -> dict[str, object]:
    """Of a model whose layers have so many bytes of weights in bf16, or next to none."""
    params = weight_bytes // 2 // num_layers - _ATTENTION_PARAMS
    size = max(round(params / (3 * HIDDEN_SIZE)), HIDDEN_SIZE)
    return {**_TINY, "num_hidden_layers": num_layers, "intermediate_size": size}
