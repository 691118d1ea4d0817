"""Bytes that ranks together read from memory in a step that decodes. Pure arithmetic; knows no times."""

from collections.abc import Sequence

from kvspan.config.model import ModelConfig
from kvspan.cost.memory import kv_bytes_per_local_token
from kvspan.cost.weights import Matrix, WeightDtypes, rank_weights
from kvspan.topology import Topology


def kv_bytes_read(model: ModelConfig, topology: Topology, *, kv_dtype_bytes: int) -> int:
    """Bytes that the ranks together read of one token that a row sees, copies of KV heads included.

    Of the whole copies that PCP coordinates keep where sequences are not spread, a row reads one.

    Args:
        model: sizes.
        topology: a legal layout.
        kv_dtype_bytes: bytes of one cached element.
    """
    local = kv_bytes_per_local_token(model, topology, kv_dtype_bytes=kv_dtype_bytes)
    return local * topology.world_size // max(topology.dcp_size, topology.pcp_size)


def weight_bytes_read(
    model: ModelConfig,
    weight_bytes: int,
    *,
    num_rows: int,
    dtype_bytes: int,
    coordinates: int = 1,
    as_team: bool = False,
) -> float:
    """Bytes of weights that a step reads: each once a PCP coordinate, however many rows it has.

    Of an embedding that is not the output layer only the rows of the step's tokens are read, and of
    routed experts those that a row picked, which is an expectation: rows are taken to pick evenly.

    Args:
        model: sizes.
        weight_bytes: that all ranks keep.
        num_rows: rows of the step, shared out evenly.
        dtype_bytes: bytes of one weight.
        coordinates: P.
        as_team: whether they read feed-forward parts and output layer once in all (`cost.team`).
    """
    rows = num_rows if as_team else num_rows / coordinates
    row_bytes = model.hidden_size * dtype_bytes
    embedding = 0.0 if model.tie_word_embeddings else (model.vocab_size - rows) * row_bytes
    of_a_copy = weight_bytes / coordinates - embedding - _left_experts(model, rows) * dtype_bytes
    once = 0.0
    if as_team:
        whole = rank_weights(model, Topology(), replicate_q=False, dtypes=WeightDtypes())
        parts = _params(whole.dense) * whole.num_dense_layers + whole.head.params
        each = _params(whole.shared) + whole.num_experts * _params(whole.expert)
        parts += each * whole.num_expert_layers
        once = (parts - _left_experts(model, rows)) * dtype_bytes
    return coordinates * (of_a_copy - once) + once


def _left_experts(model: ModelConfig, rows: float) -> float:
    """Elements of routed experts that no row picked."""
    if (moe := model.moe) is None:
        return 0.0
    experts = len(moe.layers) * moe.num_experts * 3 * moe.intermediate_size * model.hidden_size
    return float(experts * (1 - moe.experts_per_token / moe.num_experts) ** rows)


def _params(matrices: Sequence[Matrix]) -> int:
    return sum(m.params for m in matrices)
