"""kvspan: a long-context inference engine whose KV cache spans devices.

Names only, loaded when they are first used: `import kvspan.cost` must not load torch.
"""

import importlib
from typing import TYPE_CHECKING

from kvspan.config.environment import spin_briefly

if TYPE_CHECKING:
    from kvspan.engine.async_llm import AsyncLLM
    from kvspan.engine.llm import LLM
    from kvspan.errors import (
        ConfigError,
        EngineDeadError,
        KvspanError,
        LayoutError,
        ModelError,
        OutputError,
        RequestError,
    )
    from kvspan.request import CompletionOutput, RequestOutput, SamplingParams
    from kvspan.structured import StructuredOutputsParams

spin_briefly()  # before anything loads torch

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "AsyncLLM",
    "SamplingParams",
    "StructuredOutputsParams",
    "RequestOutput",
    "CompletionOutput",
    "KvspanError",
    "ConfigError",
    "LayoutError",
    "ModelError",
    "RequestError",
    "OutputError",
    "EngineDeadError",
]

_ROOMS = {
    "LLM": "kvspan.engine.llm",
    "AsyncLLM": "kvspan.engine.async_llm",
    **dict.fromkeys(("SamplingParams", "RequestOutput", "CompletionOutput"), "kvspan.request"),
    "StructuredOutputsParams": "kvspan.structured",
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return vars(importlib.import_module(_ROOMS.get(name, "kvspan.errors")))[name]
