"""Qwen3, dense."""

from kvspan.config.model import ModelConfig
from kvspan.models.base import RankContext
from kvspan.models.dense import DenseDecoder, DenseTraits


def qwen3(config: ModelConfig, context: RankContext) -> DenseDecoder:
    """Llama with an RMSNorm over each head of q and k."""
    traits = DenseTraits(qkv_bias=config.attention_bias, o_bias=config.attention_bias, qk_norm=True)
    return DenseDecoder(config, traits, context)
