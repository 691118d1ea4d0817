"""Llama 2 and 3, SmolLM2 and whatever else calls itself LlamaForCausalLM."""

from kvspan.config.model import ModelConfig
from kvspan.models.base import RankContext
from kvspan.models.decoder import Decoder
from kvspan.models.dense import DenseTraits, dense_decoder


def llama(config: ModelConfig, context: RankContext) -> Decoder:
    """The plain member of the family; biases are there if the config says so."""
    traits = DenseTraits(
        qkv_bias=config.attention_bias, o_bias=config.attention_bias, mlp_bias=config.mlp_bias
    )
    return dense_decoder(config, traits, context)
