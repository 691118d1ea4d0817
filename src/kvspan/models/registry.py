"""Which architecture is built by what. A new dense model is one short file and one line here.

A mixture of experts is built like its dense sibling: its config says which layers have experts.
"""

from collections.abc import Callable

from kvspan.config.model import ModelConfig
from kvspan.errors import ModelError
from kvspan.models.base import Model, RankContext
from kvspan.models.deepseek import deepseek
from kvspan.models.llama import llama
from kvspan.models.qwen2 import qwen2
from kvspan.models.qwen3 import qwen3

BUILDERS: dict[str, Callable[[ModelConfig, RankContext], Model]] = {
    "LlamaForCausalLM": llama,
    "Qwen2ForCausalLM": qwen2,
    "Qwen2MoeForCausalLM": qwen2,
    "Qwen3ForCausalLM": qwen3,
    "Qwen3MoeForCausalLM": qwen3,
    "DeepseekV2ForCausalLM": deepseek,
    "DeepseekV3ForCausalLM": deepseek,
}
"""Hugging Face class name -> builder."""


def check_architecture(config: ModelConfig) -> None:
    """Refuses a model that nobody here can build, before any rank is started.

    Raises:
        ModelError: the architecture is not known; the sentence lists those that are.
    """
    if config.architecture not in BUILDERS:
        raise ModelError(f"Unknown architecture {config.architecture} (has {', '.join(BUILDERS)}).")


def build_model(config: ModelConfig, context: RankContext) -> Model:
    """One rank's part of a model, its parameters not filled yet.

    Raises:
        ModelError: the architecture is not known.
    """
    check_architecture(config)
    return BUILDERS[config.architecture](config, context)
