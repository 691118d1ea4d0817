"""What will run: every choice made, nothing left to "auto". Knows values, not how they were chosen.

`cost.choose` makes it from what was asked; workers get it as it is. Nobody writes to it.
"""

import msgspec

from kvspan.config.model import ModelConfig
from kvspan.layout import CacheLayout
from kvspan.topology import Span, Topology


class Resolved(msgspec.Struct, frozen=True, kw_only=True):
    """What every rank is started with.

    Args:
        model: directory, file, built-in name or hub id.
        tokenizer: the same for the tokenizer.
        load_format: `auto`, `safetensors`, `gguf` or `dummy`, for the loader.
        model_config: sizes and settings, with `--hf-overrides` in them.
        tp_size: T, ranks that share FFN, embedding and head.
        dcp_size: W, ranks that share a sequence.
        pcp_size: P, ranks that share rows.
        block_size: B, tokens of a block on one rank.
        interleave: I, tokens dealt to a rank at a time.
        exchange: how partial results meet, `a2a` or `ag_rs`.
        replicate_q: whether each rank projects all queries of its DCP group.
        expert_parallel: whether each rank keeps whole experts, or a part of each.
        comm: transport of collectives between processes, `shm`, `gloo` or `nccl`.
        device: `cpu` or `cuda`.
        dtype: of weights and activations: `bfloat16`, `float16` or `float32`.
        kv_dtype: of cached keys and values, likewise, or `fp8_e4m3` or `int8`.
        span_threshold: tokens up to which a request stays on its home; 0 = it never does.
        spread_every: rows of requests on several ranks run in every so many steps, if there are others.
        prefill_strategy: what travels for cached context, `allgather_q`, `allgather_kv` or
            `fewest_bytes`, which is either, sequence by sequence.
        workspace_tokens: cached tokens that a rank gathers, or expands to keys and values, at once;
            a multiple of B and of W.
        split_tokens: new tokens from which on PCP coordinates cut a row; shorter ones stay whole.
        meet_tokens: new tokens from which on they meet to share out a row that has a home.
        together_tokens: latents from which on they share out making keys and values of them.
        team_rows: rows of one with which they multiply those of all, each with a part of the weights.
        max_model_len: tokens of prompt and output together.
        max_num_batched_tokens: tokens of a step at the most.
        mixed_chunk_size: those of prompts in a step in which others decode, at the most.
        max_num_seqs: requests that run at once, at the most.
        max_logprobs: log-probabilities at each position that a request may ask for; -1 = any number.
        enable_prefix_caching: whether the KV of common prefixes is reused.
        enable_chunked_prefill: whether a prompt may take several steps.
        seed: of sampling and of dummy weights.
        step_timeout_s: after which a rank that does not answer counts as dead.
        executor: `inprocess` (ranks are threads) or `mp` (processes).
        num_threads: threads of each rank.
        kv_budget_bytes: of each rank's KV cache, or None for a fraction of what is free.
        kv_fraction: of a GPU for weights and cache, or of the host's free memory for all caches;
            counts when there is no `kv_budget_bytes`.
        sampling_defaults: parameters of `SamplingParams` for requests that do not say them.
        why: for each choice that nobody made, a sentence of reason, by name.
        notes: sentences about what is not loaded, and flags that were given and have no effect.
    """

    model: str
    tokenizer: str
    load_format: str
    model_config: ModelConfig
    tp_size: int
    dcp_size: int
    pcp_size: int
    block_size: int
    interleave: int
    exchange: str
    replicate_q: bool
    expert_parallel: bool
    comm: str
    device: str
    dtype: str
    kv_dtype: str
    span_threshold: int
    spread_every: int
    prefill_strategy: str
    workspace_tokens: int
    split_tokens: int
    meet_tokens: int
    together_tokens: int
    team_rows: Span
    max_model_len: int
    max_num_batched_tokens: int
    mixed_chunk_size: int
    max_num_seqs: int
    max_logprobs: int
    enable_prefix_caching: bool
    enable_chunked_prefill: bool
    seed: int
    step_timeout_s: float
    executor: str
    num_threads: int
    kv_budget_bytes: int | None
    kv_fraction: float
    sampling_defaults: dict[str, int | float]
    why: dict[str, str]
    notes: tuple[str, ...]

    @property
    def topology(self) -> Topology:
        """The grid of ranks."""
        return Topology(tp_size=self.tp_size, dcp_size=self.dcp_size, pcp_size=self.pcp_size)

    @property
    def ranks_are_homes(self) -> bool:
        """Whether each rank of a DCP group is a home, as where no PCP coordinates are."""
        return self.span_threshold > 0 and self.pcp_size == 1 < self.dcp_size

    @property
    def num_homes(self) -> int:
        """Homes of a DCP group: PCP coordinates, or its ranks; 1 = it is not divided."""
        return self.dcp_size if self.ranks_are_homes else self.pcp_size

    @property
    def cache_layout(self) -> CacheLayout:
        """How blocks and ranks share a sequence."""
        return CacheLayout(
            block_size=self.block_size, dcp_size=self.dcp_size, interleave=self.interleave
        )
