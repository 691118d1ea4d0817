"""Qwen2 and Qwen2.5, dense."""

from kvspan.config.model import ModelConfig
from kvspan.models.base import RankContext
from kvspan.models.decoder import Decoder
from kvspan.models.dense import DenseTraits, dense_decoder


def qwen2(config: ModelConfig, context: RankContext) -> Decoder:
    """Llama with a bias on q, k and v, whatever its config says of biases."""
    return dense_decoder(config, DenseTraits(qkv_bias=True), context)
