"""Bytes that ranks together read from memory in a step that decodes. Pure arithmetic; knows no times."""

from kvspan.config.model import ModelConfig
from kvspan.cost.memory import kv_bytes_per_local_token
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
    model: ModelConfig, weight_bytes: int, *, num_rows: int, dtype_bytes: int
) -> float:
    """Bytes of weights that a step reads: each once, however many rows it has.

    Of an embedding that is not the output layer only the rows of the step's tokens are read, and of
    routed experts those that a row picked, which is an expectation: rows are taken to pick evenly.

    Args:
        model: sizes.
        weight_bytes: that all ranks keep.
        num_rows: rows of the step.
        dtype_bytes: bytes of one weight.
    """
    row = model.hidden_size * dtype_bytes
    unread = 0.0 if model.tie_word_embeddings else float((model.vocab_size - num_rows) * row)
    if (moe := model.moe) is not None:
        experts = len(moe.layers) * moe.num_experts * 3 * moe.intermediate_size * row
        unread += experts * (1 - moe.experts_per_token / moe.num_experts) ** num_rows
    return weight_bytes - unread
