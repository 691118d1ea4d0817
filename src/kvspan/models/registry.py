"""Which architecture is built by what. A new dense model is one short file and one line here.

A mixture of experts is built like its dense sibling: its config says which layers have experts.
"""

from collections.abc import Callable, Mapping
from typing import Any

from kvspan.config.model import ModelConfig, named_architectures
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


def check_architecture(raw: Mapping[str, Any], *, where: str) -> None:
    """Refuses a model that nobody here can build, before a key is looked for that only others have.

    Args:
        raw: the mapping of `config.json`.
        where: file to name in errors.

    Raises:
        ModelError: the architecture is not known; the sentence lists those that are.
    """
    names, known = named_architectures(raw, where=where), ", ".join(BUILDERS)
    if len(names) != 1:
        raise ModelError(f'{where}: "architectures" must name one class, got {names!r} (has {known}).')
    if names[0] not in BUILDERS:
        raise ModelError(f"{where}: unknown architecture {names[0]} (has {known}).")


def build_model(config: ModelConfig, context: RankContext) -> Model:
    """One rank's part of a model whose architecture is known, its parameters not filled yet."""
    return BUILDERS[config.architecture](config, context)
