"""The command that runs what was planned: every flag with which kvspan would not choose the same itself.

Knows the options of an engine. Knows no trace and no printing.
"""

import json
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from kvspan.config.engine import ENGINE_OPTIONS, EngineConfig
from kvspan.config.model import ModelConfig
from kvspan.config.options import Option
from kvspan.config.resolved import Resolved
from kvspan.config.sizes import DTYPE_BYTES
from kvspan.cost.choose import Machine, resolve
from kvspan.cost.weights import WEIGHT_BITS
from kvspan.plan.search import Plan, Planned

MANY_GPUS = 10**6
"""Of a machine on which any plan can be resolved: whether there are so many is not asked there."""

_COMPUTED_IN = {"bf16": "bfloat16", "fp32": "float32"}
"""Weights as they are multiplied with -> the dtype that an engine is asked for."""


class Commands:
    """Command lines for the candidates of a plan.

    Args:
        plan: the question and the answer.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        bare = EngineConfig(model=plan.asked.model, device="cuda")
        self._own = resolve(bare, plan.model.config, Machine(cores=1, num_gpus=1))

    def config(self, planned: Planned, *, max_model_len: int | None = None) -> EngineConfig:
        """What an engine is asked, so that it runs as it was planned; every choice is in it.

        Args:
            planned: the candidate.
            max_model_len: tokens of a request at the most; None = as the plan has it.
        """
        asked, candidate = self._plan.asked, planned.candidate
        limit = max_model_len or self._plan.max_model_len(planned)
        spread = candidate.topology.dcp_size > 1
        return EngineConfig(
            model=asked.model,
            dtype=self._dtype,
            tensor_parallel_size=candidate.topology.tp_size,
            decode_context_parallel_size=candidate.topology.dcp_size,
            prefill_context_parallel_size=candidate.topology.pcp_size,
            block_size=asked.block_size,
            cp_kv_cache_interleave_size=candidate.interleave if spread else None,
            dcp_comm_backend=candidate.exchange if spread else "auto",
            dcp_q_replicate=("on" if candidate.replicate_q else "off") if spread else "auto",
            kv_cache_dtype=asked.kv_cache_dtype,
            gpu_memory_utilization=asked.gpu_memory_utilization,
            max_model_len=limit,
            max_num_seqs=asked.max_num_seqs,
            max_num_batched_tokens=asked.max_num_batched_tokens,
            enable_expert_parallel=asked.enable_expert_parallel,
            hf_overrides=_stretched(self._plan.model.config, limit),
            device="cuda",
        )

    def of(self, planned: Planned) -> str:
        """`kvspan serve ...` with all that the candidate was planned with, as a shell reads it.

        Of replicas on several machines it is the command for each machine.
        """
        flags = self._flags(self.config(planned), replicas=self._plan.replicas_of_host(planned))
        return shlex.join(("kvspan", "serve", self._plan.model.served, *flags))

    @property
    def _dtype(self) -> str:
        """That in which the engine computes with such weights: its own choice, if that is as wide."""
        ends = self._plan.dtypes.ends
        as_wide = DTYPE_BYTES[self._own.dtype] * 8 == WEIGHT_BITS[ends]
        return self._own.dtype if as_wide else _COMPUTED_IN[ends]

    def _flags(self, config: EngineConfig, *, replicas: int) -> Iterator[str]:
        """Words of the command line: sizes of the layout first."""
        wanted = {**vars(config), "data_parallel_size": replicas}
        alone = _left_alone(self._own, config)
        for option in sorted(ENGINE_OPTIONS, key=lambda option: option.short is None):
            value = wanted[option.name]
            if value != alone.get(option.name, option.default):
                yield from _words(option, value)


def stretched_model(model: ModelConfig, config: EngineConfig) -> ModelConfig:
    """A model as the overrides of `Commands.config` change it."""
    return msgspec.structs.replace(model, **config.hf_overrides)


def _stretched(model: ModelConfig, limit: int) -> Mapping[str, int]:
    """Keys to replace in a model's config so that it takes so many tokens."""
    return {"max_position_embeddings": limit} if limit > model.max_position_embeddings else {}


def _left_alone(own: Resolved, config: EngineConfig) -> Mapping[str, Any]:
    """What an engine chooses where nobody says, by option; what has no "auto" has its default.

    Args:
        own: of an engine that is only told its model.
        config: what else it is told.
    """
    return {
        "model": config.model,
        "device": config.device,
        "dtype": own.dtype,
        "kv_cache_dtype": config.dtype,  # by default the cache's is that of the activations
        "cp_kv_cache_interleave_size": config.block_size if config.cp_kv_cache_interleave_size else None,
        "max_model_len": config.max_model_len if config.hf_overrides else own.max_model_len,
        "max_num_seqs": own.max_num_seqs,
        "max_num_batched_tokens": own.max_num_batched_tokens,
        "gpu_memory_utilization": own.kv_fraction,
    }


def _words(option: Option, value: object) -> Iterator[str]:
    """An option as it is typed."""
    if option.kind.switch:
        yield option.flag if value else option.flag.replace("--", "--no-", 1)
        return
    yield option.short or option.flag
    yield json.dumps(value) if isinstance(value, Mapping) else str(value)
