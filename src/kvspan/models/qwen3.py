"""Qwen3, dense."""

from kvspan.config.model import ModelConfig
from kvspan.models.base import RankContext
from kvspan.models.decoder import Decoder
from kvspan.models.dense import DenseTraits, dense_decoder


def qwen3(config: ModelConfig, context: RankContext) -> Decoder:
    """Llama with an RMSNorm over each head of q and k."""
    traits = DenseTraits(qkv_bias=config.attention_bias, o_bias=config.attention_bias, qk_norm=True)
    return dense_decoder(config, traits, context)
