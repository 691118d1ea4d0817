"""Qwen2 and Qwen2.5, dense."""

from kvspan.config.model import ModelConfig
from kvspan.models.base import RankContext
from kvspan.models.dense import DenseDecoder, DenseTraits


def qwen2(config: ModelConfig, context: RankContext) -> DenseDecoder:
    """Llama with a bias on q, k and v, whatever its config says of biases."""
    return DenseDecoder(config, DenseTraits(qkv_bias=True), context)
