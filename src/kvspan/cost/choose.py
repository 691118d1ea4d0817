"""From what was asked to what will run: every "auto" becomes a value with its reason.

Pure: the model and the machine come in as facts. What can be judged by time is, if there are facts of
the machine's speed, and by bytes if there are none. Measures nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Self

import msgspec

from kvspan.config.engine import EngineConfig
from kvspan.config.model import ModelConfig
from kvspan.config.resolved import Resolved
from kvspan.config.sizes import DTYPE_BYTES, KV_DTYPE_BYTES
from kvspan.cost.choice import Choice
from kvspan.cost.exchanges import choose_exchange, choose_queries
from kvspan.cost.facts import Device
from kvspan.cost.notes import layout_sentence, notes, sampling_note
from kvspan.cost.pace import MULTIPLIED_FLOPS, Pace
from kvspan.cost.prefill import choose_prefill, workspace_tokens
from kvspan.cost.rows import choose_split
from kvspan.cost.span import choose_meet, choose_span, choose_spread_every, queries_at_home
from kvspan.cost.team import TeamCost, choose_team
from kvspan.cost.timed import Timed
from kvspan.cost.together import choose_together
from kvspan.cost.weights import WeightDtypes, active_params, rank_weights
from kvspan.errors import ConfigError
from kvspan.layout import CacheLayout
from kvspan.topology import LayoutMode, Span, Topology, check_layout

GPU_FRACTION = 0.9
"""Of a GPU, for weights and KV cache; what is left is for activations."""
HOST_FRACTION = 0.4
"""Of a host's free memory, for the KV caches of all ranks: other programs live there too."""
DEFAULT_BATCHED_TOKENS = 2048
DEFAULT_NUM_SEQS = 256
MIXED_STEP_S = 1.0
"""That streams wait for a token on a CPU, at the most, while a prompt is computed beside them. Half of
that costs 4% of mixed traffic's output (SmolLM2, 2 cores), a fifth 7%: a step has costs of its own."""
LEAST_MIXED_TOKENS = 256
"""Fewer tokens of a prompt would be bound by reading weights, and take longer in all."""


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """What ranks can run on.

    Args:
        cores: that this process may use.
        num_gpus: CUDA devices.
        no_shm: why ranks cannot exchange through shared memory, as a sentence's end; None = they can.
        facts: how fast its GPUs are; None = that is not known.
    """

    cores: int
    num_gpus: int = 0
    no_shm: str | None = None
    facts: Device | None = None


def resolve(
    asked: EngineConfig,
    model: ModelConfig,
    machine: Machine,
    *,
    sampling_defaults: Mapping[str, int | float] = MappingProxyType({}),
) -> Resolved:
    """Checks what was asked and makes the choices that it leaves.

    Args:
        asked: options.
        model: sizes and settings, with `asked.hf_overrides` in them.
        machine: facts.
        sampling_defaults: parameters for requests that do not say them.

    Raises:
        LayoutError: ranks, heads, blocks and interleave do not fit together.
        ConfigError: the machine or the model has not got what was asked for.
    """
    topology = Topology(
        tp_size=asked.tensor_parallel_size,
        dcp_size=asked.decode_context_parallel_size,
        pcp_size=asked.prefill_context_parallel_size,
    )
    mode = check_layout(topology, model.heads)
    chosen = _choose(_Given.of(asked, model, machine, topology, mode))
    return Resolved(
        model=asked.model,
        tokenizer=asked.tokenizer or asked.model,
        load_format=asked.load_format,
        model_config=model,
        tp_size=topology.tp_size,
        dcp_size=topology.dcp_size,
        pcp_size=topology.pcp_size,
        block_size=asked.block_size,
        interleave=chosen.interleave.value,
        exchange=chosen.exchange.value,
        replicate_q=chosen.replicate_q.value,
        expert_parallel=asked.enable_expert_parallel,
        comm=chosen.comm.value,
        device=chosen.device.value,
        dtype=chosen.dtype.value,
        kv_dtype=chosen.kv_dtype.value,
        span_threshold=chosen.span_threshold.value,
        spread_every=chosen.spread_every.value,
        prefill_strategy=chosen.prefill_strategy.value,
        workspace_tokens=workspace_tokens(asked, model, topology, DTYPE_BYTES[chosen.dtype.value]),
        split_tokens=chosen.split_tokens.value,
        meet_tokens=chosen.meet_tokens.value,
        together_tokens=chosen.together_tokens.value,
        team_rows=chosen.team_rows.value,
        max_model_len=chosen.max_model_len.value,
        max_num_batched_tokens=chosen.max_num_batched_tokens.value,
        mixed_chunk_size=chosen.mixed_chunk_size.value,
        max_num_seqs=chosen.max_num_seqs.value,
        max_logprobs=asked.max_logprobs,
        enable_prefix_caching=asked.enable_prefix_caching,
        enable_chunked_prefill=asked.enable_chunked_prefill,
        seed=asked.seed,
        step_timeout_s=asked.step_timeout,
        executor=chosen.executor.value,
        num_threads=chosen.num_threads.value,
        kv_budget_bytes=asked.kv_cache_memory,
        kv_fraction=chosen.kv_fraction.value,
        sampling_defaults=dict(sampling_defaults),
        why={"layout": layout_sentence(model, topology, mode, dcp_mode=asked.dcp_mode), **chosen.why()},
        notes=notes(asked, model, topology, chosen.executor.value) + sampling_note(sampling_defaults),
    )


@dataclass(frozen=True, kw_only=True)
class _Choices:
    """Every choice that may be left to kvspan, under its name in `Resolved`."""

    interleave: Choice[int]
    exchange: Choice[str]
    replicate_q: Choice[bool]
    span_threshold: Choice[int]
    spread_every: Choice[int]
    prefill_strategy: Choice[str]
    split_tokens: Choice[int]
    meet_tokens: Choice[int]
    together_tokens: Choice[int]
    team_rows: Choice[Span]
    device: Choice[str]
    comm: Choice[str]
    dtype: Choice[str]
    kv_dtype: Choice[str]
    max_model_len: Choice[int]
    max_num_batched_tokens: Choice[int]
    mixed_chunk_size: Choice[int]
    max_num_seqs: Choice[int]
    executor: Choice[str]
    num_threads: Choice[int]
    kv_fraction: Choice[float]

    def why(self) -> dict[str, str]:
        """The reasons of those that were left."""
        return {name: choice.why for name, choice in vars(self).items() if choice.why is not None}


@dataclass(frozen=True)
class _Given:
    """What is asked, and what ranks compute on, speak through and compute in: the rest follows."""

    asked: EngineConfig
    model: ModelConfig
    machine: Machine
    topology: Topology
    mode: LayoutMode
    device: Choice[str]
    comm: Choice[str]
    dtype: Choice[str]
    kv_dtype: Choice[str]

    @classmethod
    def of(
        cls,
        asked: EngineConfig,
        model: ModelConfig,
        machine: Machine,
        topology: Topology,
        mode: LayoutMode,
    ) -> Self:
        """What follows from the options and the machine alone."""
        device = _choose_device(asked, machine, topology.world_size)
        comm = _choose_comm(asked, machine, device.value)
        dtype = _choose_dtype(asked, model, device.value)
        kv_dtype = _choose_kv_dtype(asked, dtype.value)
        return cls(asked, model, machine, topology, mode, device, comm, dtype, kv_dtype)

    @property
    def sizes(self) -> tuple[EngineConfig, ModelConfig, Topology]:
        return self.asked, self.model, self.topology

    @property
    def dtype_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype.value]

    @property
    def pace(self) -> Pace:
        """What work and sharing it out cost a rank."""
        if self.timed is None:
            return Pace.assumed(self.device.value, self.comm.value)
        return Pace.of_device(self.timed.device, self.topology)

    @cached_property
    def timed(self) -> Timed | None:
        """What takes how long, where that is known."""
        if self.machine.facts is None or self.device.value != "cuda":
            return None
        kv_bytes = KV_DTYPE_BYTES[self.kv_dtype.value]
        return Timed.of(self.model, self.machine.facts, self.topology, kv_dtype_bytes=kv_bytes)


def _choose(given: _Given) -> _Choices:
    asked, sizes, dtype_bytes = given.asked, given.sizes, given.dtype_bytes
    device, comm, world_size = given.device.value, given.comm.value, given.topology.world_size
    interleave = _choose_interleave(asked, given.topology)
    exchange = choose_exchange(*sizes, dtype_bytes, given.timed)
    replicate_q = _choose_queries(given, exchange.value)
    max_model_len = _choose_max_model_len(asked, given.model)
    batched_tokens = _choose_batched_tokens(asked, max_model_len.value)
    num_threads = _choose_threads(asked, given.machine, world_size)
    return _Choices(
        interleave=interleave,
        exchange=exchange,
        replicate_q=replicate_q,
        span_threshold=_choose_span(given, interleave.value),
        spread_every=choose_spread_every(*sizes, comm=comm, device=device, dtype_bytes=dtype_bytes),
        prefill_strategy=choose_prefill(
            *sizes, exchange=exchange.value, replicate_q=replicate_q.value, dtype_bytes=dtype_bytes
        ),
        split_tokens=_choose_split(given),
        meet_tokens=choose_meet(*sizes, comm=comm, device=device),
        together_tokens=_choose_together(given),
        team_rows=_choose_team(given),
        device=given.device,
        comm=given.comm,
        dtype=given.dtype,
        kv_dtype=given.kv_dtype,
        max_model_len=max_model_len,
        max_num_batched_tokens=batched_tokens,
        mixed_chunk_size=_choose_mixed_chunk(
            asked,
            given.model,
            device,
            num_threads=num_threads.value * world_size,
            batched_tokens=batched_tokens.value,
        ),
        max_num_seqs=_choose_num_seqs(asked, batched_tokens.value),
        executor=_choose_executor(asked, world_size),
        num_threads=num_threads,
        kv_fraction=_choose_fraction(asked, device),
    )


def _choose_queries(given: _Given, exchange: str) -> Choice[bool]:
    return queries_at_home(*given.sizes, given.dtype_bytes) or choose_queries(
        *given.sizes, given.mode, given.dtype_bytes, exchange, given.timed
    )


def _choose_span(given: _Given, interleave: int) -> Choice[int]:
    return choose_span(
        *given.sizes,
        interleave=interleave,
        comm=given.comm.value,
        device=given.device.value,
        kv_dtype_bytes=KV_DTYPE_BYTES[given.kv_dtype.value],
        timed=given.timed,
    )


def _choose_split(given: _Given) -> Choice[int]:
    topology, timed = given.topology, given.timed
    rates = None if timed is None else timed.device.rates_of(topology.world_size, played=False)
    return choose_split(topology.pcp_size, rates)


def _choose_together(given: _Given) -> Choice[int]:
    return choose_together(given.model, given.topology, given.pace, dtype_bytes=given.dtype_bytes)


def _choose_team(given: _Given) -> Choice[Span]:
    weights = rank_weights(
        given.model,
        given.topology,
        replicate_q=False,
        dtypes=WeightDtypes(),
        expert_parallel=given.asked.enable_expert_parallel,
    )
    device = None if given.timed is None else given.timed.device
    return choose_team(TeamCost(given.model, given.topology, weights, given.pace, device))


def _choose_interleave(asked: EngineConfig, topology: Topology) -> Choice[int]:
    size = asked.cp_kv_cache_interleave_size
    layout = CacheLayout(  # refuses a size that does not divide the block
        block_size=asked.block_size,
        dcp_size=topology.dcp_size,
        interleave=asked.block_size if size is None else size,
    )
    if size is not None:
        return Choice(size)
    why = f"whole blocks stay on one rank, so prefixes hit in units of {layout.unit_tokens} tokens."
    return Choice(layout.interleave, why)


def _choose_device(asked: EngineConfig, machine: Machine, world_size: int) -> Choice[str]:
    gpus = machine.num_gpus
    device = asked.device if asked.device != "auto" else "cuda" if gpus else "cpu"
    if device == "cuda" and not gpus:
        raise ConfigError("--device cuda needs a CUDA device, and this machine has none: use cpu.")
    if device == "cuda" and world_size > gpus:
        raise ConfigError(
            f"--tensor-parallel-size {world_size} needs {world_size} CUDA devices, and this machine has "
            f"{gpus}: lower it, or use --device cpu."
        )
    if asked.device != "auto":
        return Choice(device)
    return Choice(device, f"this machine has {gpus or 'no'} CUDA device{'s' if gpus > 1 else ''}.")


def _choose_comm(asked: EngineConfig, machine: Machine, device: str) -> Choice[str]:
    carriers = {"cpu": ("shm", "gloo"), "cuda": ("nccl",)}[device]
    if asked.comm not in ("auto", *carriers):
        raise ConfigError(
            f"--comm {asked.comm} does not carry tensors of --device {device}: use "
            f"{' or '.join((*carriers, 'auto'))}."
        )
    if asked.comm == "shm" and machine.no_shm is not None:
        raise ConfigError(f"--comm shm cannot run: {machine.no_shm}. Use gloo or auto.")
    if asked.comm != "auto":
        return Choice(asked.comm)
    if device == "cuda":
        return Choice("nccl", "ranks compute on cuda.")
    if machine.no_shm is not None:
        return Choice("gloo", f"ranks compute on cpu, and {machine.no_shm}.")
    return Choice("shm", "all ranks are on this host and compute on cpu.")


def _choose_dtype(asked: EngineConfig, model: ModelConfig, device: str) -> Choice[str]:
    if asked.dtype != "auto":
        return Choice(asked.dtype)
    if model.dtype not in DTYPE_BYTES:
        return Choice("bfloat16", f"the checkpoint's {model.dtype} is none that kvspan computes in.")
    if model.dtype == "float16" and device == "cpu":
        return Choice("bfloat16", "the checkpoint is float16, which CPUs compute slowly.")
    return Choice(model.dtype, "the checkpoint's.")


def _choose_kv_dtype(asked: EngineConfig, dtype: str) -> Choice[str]:
    if asked.kv_cache_dtype != "auto":
        return Choice(asked.kv_cache_dtype)
    return Choice(dtype, "that of the activations.")


def _choose_max_model_len(asked: EngineConfig, model: ModelConfig) -> Choice[int]:
    limit = model.max_position_embeddings
    if asked.max_model_len is None:
        return Choice(limit, "the positions that the model was made for.")
    if asked.max_model_len < 2:
        raise ConfigError("--max-model-len must be at least 2: a token of prompt and one of output.")
    if asked.max_model_len > limit:
        raise ConfigError(
            f"--max-model-len {asked.max_model_len} is over the {limit} positions that the model was "
            f"made for: lower it, or stretch the model with --hf-overrides "
            f"""'{{"max_position_embeddings": {asked.max_model_len}}}'."""
        )
    return Choice(asked.max_model_len)


def _choose_batched_tokens(asked: EngineConfig, max_model_len: int) -> Choice[int]:
    size, whole_prompt = asked.max_num_batched_tokens, not asked.enable_chunked_prefill
    if size is None:
        least = max(max_model_len if whole_prompt else 1, asked.max_num_seqs or 1)
        why = (
            f"room for {'a whole prompt' if least == max_model_len else 'a token of each request'}."
            if least > DEFAULT_BATCHED_TOKENS
            else "a longer prompt is computed in parts, between which others get tokens."
        )
        return Choice(max(least, DEFAULT_BATCHED_TOKENS), why)
    if whole_prompt and size < max_model_len:
        raise ConfigError(
            f"--max-num-batched-tokens {size} is under --max-model-len {max_model_len}, and without "
            f"chunked prefill a prompt runs in one step: raise it to at least {max_model_len}, or leave "
            "--enable-chunked-prefill on."
        )
    return Choice(size)


def _choose_mixed_chunk(
    asked: EngineConfig, model: ModelConfig, device: str, *, num_threads: int, batched_tokens: int
) -> Choice[int]:
    if asked.mixed_chunk_size is not None and asked.mixed_chunk_size > batched_tokens:
        return Choice(
            batched_tokens,
            f"a step has no more (--max-num-batched-tokens), so --mixed-chunk-size "
            f"{asked.mixed_chunk_size} bounds nothing.",
        )
    if asked.mixed_chunk_size is not None:
        return Choice(asked.mixed_chunk_size)
    if device == "cuda":
        return Choice(batched_tokens, "a GPU computes a step soon enough for those who decode in it.")
    token_s = 2 * active_params(model) / MULTIPLIED_FLOPS[device] / num_threads
    tokens = min(max(int(MIXED_STEP_S / token_s), LEAST_MIXED_TOKENS), batched_tokens)
    return Choice(
        tokens,
        f"{num_threads} thread(s) compute {tokens:,} tokens in about {tokens * token_s:.1f} s, "
        "longer behind a long context, and the streams beside them wait.",
    )


def _choose_num_seqs(asked: EngineConfig, batched_tokens: int) -> Choice[int]:
    if asked.max_num_seqs is None:
        return Choice(
            min(DEFAULT_NUM_SEQS, batched_tokens),
            f"at most {DEFAULT_NUM_SEQS}, and a step has room for a token of each.",
        )
    if asked.max_num_seqs > batched_tokens:
        raise ConfigError(
            f"--max-num-seqs {asked.max_num_seqs} is over --max-num-batched-tokens {batched_tokens}, "
            "and every running request takes a token of a step: lower the one or raise the other."
        )
    return Choice(asked.max_num_seqs)


def _choose_executor(asked: EngineConfig, world_size: int) -> Choice[str]:
    if asked.distributed_executor_backend != "auto":
        return Choice(asked.distributed_executor_backend)
    if world_size == 1:
        return Choice("inprocess", "there is one rank.")
    return Choice("mp", f"{world_size} ranks compute at once in processes of their own.")


def _choose_threads(asked: EngineConfig, machine: Machine, world_size: int) -> Choice[int]:
    if asked.num_threads is not None:
        return Choice(asked.num_threads)
    return Choice(
        max(machine.cores // world_size, 1), f"{machine.cores} cores for {world_size} rank(s)."
    )


def _choose_fraction(asked: EngineConfig, device: str) -> Choice[float]:
    if asked.gpu_memory_utilization is not None:
        return Choice(asked.gpu_memory_utilization)
    if asked.kv_cache_memory is not None:
        return Choice(GPU_FRACTION if device == "cuda" else HOST_FRACTION)  # does not count
    if device == "cuda":
        return Choice(GPU_FRACTION, "leaves activations the rest of each GPU.")
    return Choice(HOST_FRACTION, "leaves other programs the rest of the host's free memory.")
