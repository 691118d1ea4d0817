"""How long a step takes: operator by operator, whichever of reading and multiplying takes longer.

Legend (per rank, one layer):
    R   rows of the step on this rank     W  dcp_size      T  tp_size     P  pcp_size
    H/A query heads of the DCP group      k  experts of a row, of E

    step = layers * (projections + attention + exchange + all-reduce + MLP or experts + all-reduce)
         + embedding, logits, host

An operator takes max(bytes / bandwidth, flops / rate) and a kernel's least time; a collective is looked
up by the bytes of its whole buffer. Nothing overlaps. Bytes of collectives come from `cost.traffic`,
bytes of the cache from `cost.memory`, rates and latencies from `cost.facts`; no constant stands here.

Knows no queue and no policy: what is in a step is told (`StepWork`).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from kvspan.config.model import ModelConfig
from kvspan.cost.facts import Device
from kvspan.cost.latents import NEVER, least_rows_to_expand
from kvspan.cost.memory import kv_bytes_per_local_token
from kvspan.cost.prefill import FEWEST_BYTES, PrefillRule
from kvspan.cost.traffic import (
    LSE_BYTES,
    SUM_BYTES,
    a2a_bytes_per_row,
    ag_rs_bytes_per_row,
    key_gather_bytes_per_token,
    query_gather_bytes_per_row,
)
from kvspan.cost.weights import (
    MULTIPLIED_IN,
    Matrix,
    RankWeights,
    WeightDtypes,
    absorbed_params,
    rank_weights,
)
from kvspan.topology import Topology

ACTIVATION_BYTES = 2
"""Activations are bfloat16."""
LOGIT_BYTES = 4
"""Logits are float32."""


@dataclass(frozen=True, slots=True)
class Habits:
    """What engines do in different ways, beside what can be asked of ours.

    Args:
        gather_latent_queries: queries of latent attention are gathered as they ask latents (wider), and
            not as they are projected.
        sum_bytes: of an element of partial results that are summed over ranks.
        prefill_strategy: what travels for cached context (`cost.prefill`).
    """

    gather_latent_queries: bool = False
    sum_bytes: int = SUM_BYTES
    prefill_strategy: str = FEWEST_BYTES


KVSPAN = Habits()
PUBLISHED = Habits(gather_latent_queries=True, sum_bytes=2, prefill_strategy="allgather_kv")
"""Of the engine whose figures with DCP are published."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """A model on some ranks: everything about a step but what is in it.

    Args:
        model: sizes.
        device: of each rank.
        topology: a legal layout.
        dtypes: of the weights.
        kv_dtype_bytes: of a cached element.
        exchange: how partial results meet, `a2a` or `ag_rs`.
        replicate_q: whether each rank projects all queries of its DCP group.
        expert_parallel: whether ranks keep whole experts.
    """

    model: ModelConfig
    device: Device
    topology: Topology
    dtypes: WeightDtypes
    kv_dtype_bytes: int
    exchange: str = "a2a"
    replicate_q: bool = False
    expert_parallel: bool = False
    habits: Habits = KVSPAN


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWork:
    """What is in a step, in sums over its rows; numbers may be means, and so not whole.

    Args:
        num_tokens: R, rows in the sense of the mathematics: tokens computed.
        num_sampled: of them that a token is sampled after.
        keys: of each sequence, keys in the cache that its rows see, summed: they are read once.
        pairs: (row, key) pairs that attention computes.
        expanded_tokens: rows of latent attention for which keys and values are made of latents.
        expanded_keys: part of `keys` that is made so.
        expanded_pairs: part of `pairs` of those rows.
        local_tokens: rows that stay with their heads, and exchange nothing.
        gathered_keys: part of `keys` that come to them: what was cached before the step.
    """

    num_tokens: float
    num_sampled: float
    keys: float
    pairs: float
    expanded_tokens: float = 0.0
    expanded_keys: float = 0.0
    expanded_pairs: float = 0.0
    local_tokens: float = 0.0
    gathered_keys: float = 0.0

    @classmethod
    def of(
        cls, chunks: Iterable[tuple[int, int]], *, num_sampled: int, ways: "Ways | None" = None
    ) -> "StepWork":
        """Sums over the sequences of a step.

        Args:
            chunks: (tokens computed before, tokens to compute) of each sequence.
            num_sampled: sequences that get a token.
            ways: of attention; None = every row asks the cache.
        """
        tokens = keys = 0
        pairs = 0.0
        prompts = []
        for start, num_tokens in chunks:
            tokens += num_tokens
            keys += start + num_tokens
            pairs += num_tokens * (start + (num_tokens + 1) / 2)
            if num_tokens > 1:
                prompts.append((start, num_tokens))
        special = ways.of(prompts) if ways is not None else {}
        return cls(num_tokens=tokens, num_sampled=num_sampled, keys=keys, pairs=pairs, **special)


@dataclass(frozen=True, slots=True)
class Ways:
    """Which rows of prompts attend in a way of their own; a decoded token always asks the cache.

    Args:
        expand_from: tokens of a sequence from which on its latents are expanded.
        rule: which sequences have their keys gathered, and so stay with their heads.
        latent: whether what is gathered is latents, which are then expanded.
    """

    expand_from: int
    rule: PrefillRule
    latent: bool

    def of(self, prompts: Sequence[tuple[float, float]]) -> dict[str, float]:
        """The fields of `StepWork` that these prompts make.

        Args:
            prompts: (tokens computed before, tokens to compute) of each.
        """
        if not prompts:
            return {}
        start, rows = np.array(prompts).T
        local = self.rule.gathers(rows.astype(np.int64), start.astype(np.int64))
        expanded = (rows >= self.expand_from) | (local & self.latent)
        return {
            "expanded_tokens": float(rows[expanded].sum()),
            "expanded_keys": float((start + rows)[expanded].sum()),
            "expanded_pairs": float((rows * (start + (rows + 1) / 2))[expanded].sum()),
            "local_tokens": float(rows[local].sum()),
            "gathered_keys": float(start[local].sum()),
        }


def decode_work(context_tokens: float, *, batch: float) -> StepWork:
    """A step in which each of `batch` sequences of `context_tokens` tokens gets one more.

    Args:
        context_tokens: tokens that each row sees, itself included.
        batch: rows.
    """
    keys = context_tokens * batch
    return StepWork(num_tokens=batch, num_sampled=batch, keys=keys, pairs=keys)


def distinct_experts(num_experts: int, *, experts_per_token: int, num_tokens: float) -> float:
    """Experts of a layer that some row of a step goes to, expected when rows choose evenly.

    Args:
        num_experts: E, that there are.
        experts_per_token: k.
        num_tokens: rows.
    """
    return float(num_experts * (1 - (1 - experts_per_token / num_experts) ** num_tokens))


class StepCost:
    """Times of a deployment's steps.

    Args:
        on: the deployment.
    """

    def __init__(self, on: Deployment) -> None:
        self.on = on
        model, topology = on.model, on.topology
        self.weights: RankWeights = rank_weights(
            model,
            topology,
            replicate_q=on.replicate_q,
            dtypes=on.dtypes,
            expert_parallel=on.expert_parallel,
        )
        self.rates = on.device.rates_of(topology.world_size)
        self.num_heads = topology.query_heads(0, model.heads).size
        self.ways = Ways(
            expand_from=NEVER if model.mla is None else least_rows_to_expand(model.mla),
            rule=PrefillRule.of(
                on.habits.prefill_strategy,
                model,
                topology,
                exchange=on.exchange,
                replicate_q=on.replicate_q,
                dtype_bytes=ACTIVATION_BYTES,
            ),
            latent=model.mla is not None,
        )
        local_token = kv_bytes_per_local_token(model, topology, kv_dtype_bytes=on.kv_dtype_bytes)
        self._kv_layer_bytes = local_token / model.num_layers

    def step_s(self, work: StepWork) -> float:
        """Seconds of a step."""
        return sum(self.parts_s(work).values())

    def parts_s(self, work: StepWork) -> dict[str, float]:
        """Seconds of a step by what they go to; all layers together."""
        model, rates = self.on.model, self.rates
        rows = work.num_tokens / self.on.topology.pcp_size
        layers, w = model.num_layers, self.weights
        absorbed_rows = (work.num_tokens - work.expanded_tokens) / self.on.topology.pcp_size
        return {
            "projections": layers
            * (self._matrices_s(w.attention, rows) + self._absorb_s(work, absorbed_rows)),
            "attention": layers * self._attention_s(work),
            "gather queries": layers * self._gathers_s(work),
            "exchange": layers * self._exchanges_s(work),
            "gather keys": layers * self._gather_keys_s(work),
            "mlp": w.num_dense_layers * self._matrices_s(w.dense, rows),
            "experts": w.num_expert_layers * self._experts_s(rows),
            "all-reduce": (2 * layers + 1) * self._all_reduce_s(rows),
            "logits": self._logits_s(work.num_sampled),
            "rows": layers * rates.layer_row_us * rows * 1e-6,
            "host": (rates.step_us + rates.row_us * work.num_tokens) * 1e-6,
        }

    def gather_queries_s(self, num_tokens: float, *, latent: bool) -> float:
        """Seconds in which a DCP group's ranks gather the queries of a layer; none if each has them all.

        Args:
            num_tokens: rows.
            latent: whether they come as they ask latents.
        """
        w, dims = self.on.topology.dcp_size, self.on.model.head_dims
        if self.on.replicate_q or w == 1 or not num_tokens:
            return 0.0
        sent = query_gather_bytes_per_row(
            num_heads=self.num_heads,
            head_dim=dims.key if latent else dims.query,
            dcp_size=w,
            dtype_bytes=ACTIVATION_BYTES,
        )
        return self._collective_s("ag", sent * num_tokens, w)

    def exchange_s(self, num_tokens: float, *, latent: bool) -> float:
        """Seconds in which partial results of a layer meet.

        Args:
            num_tokens: rows.
            latent: whether they are latents, of which whole heads must come.
        """
        w, dims = self.on.topology.dcp_size, self.on.model.head_dims
        if w == 1 or not num_tokens:
            return 0.0
        latent_dim = dims.value if latent else None
        if self.on.exchange == "a2a":
            sent = a2a_bytes_per_row(
                num_heads=self.num_heads,
                head_dim=dims.out,
                dcp_size=w,
                dtype_bytes=ACTIVATION_BYTES,
                latent_dim=latent_dim,
            )
            return self._collective_s("a2a", sent * num_tokens, w)
        lse = self.num_heads * LSE_BYTES * (w - 1)
        both = ag_rs_bytes_per_row(
            num_heads=self.num_heads, head_dim=dims.out, dcp_size=w, latent_dim=latent_dim
        )
        summed = (both - lse) * self.on.habits.sum_bytes / SUM_BYTES
        gathered = self._collective_s("ag", lse * num_tokens, w)
        return gathered + self._collective_s("rs", summed * num_tokens, w)

    def _absorb_s(self, work: StepWork, rows: float) -> float:
        """Asking latents, or making keys and values of them."""
        mla = self.on.model.mla
        if mla is None:
            return 0.0
        up = self.weights.absorb[0]
        asked = absorbed_params(mla, self.on.topology, num_heads=self.num_heads)
        expanded = self._local(work.expanded_keys)
        flops_rows = rows * asked / up.params + expanded  # in rows of the whole matrix
        return self._matrices_s((up, up), flops_rows / 2) if flops_rows else 0.0

    def _attention_s(self, work: StepWork) -> float:
        """Attention over this rank's keys, as they are cached or as they are made of latents."""
        dims, rates = self.on.model.head_dims, self.rates
        asking = work.pairs - work.expanded_pairs
        flops = (
            2
            * self.num_heads
            * (
                (dims.key + dims.value) * self._shared(asking)
                + (dims.query + dims.out) * self._shared(work.expanded_pairs)
            )
        )
        read = self._local(work.keys) * self._kv_layer_bytes
        return max(read / (rates.kv_gbs * 1e9), flops / (rates.attention_tflops * 1e12)) + self._kernel_s

    def _gathers_s(self, work: StepWork) -> float:
        asking, projected = self._travelling(work)
        latent = self.on.habits.gather_latent_queries and self.ways.latent
        return self.gather_queries_s(asking, latent=latent) + self.gather_queries_s(
            projected, latent=False
        )

    def _exchanges_s(self, work: StepWork) -> float:
        asking, projected = self._travelling(work)
        return self.exchange_s(asking, latent=self.ways.latent) + self.exchange_s(
            projected, latent=False
        )

    def _travelling(self, work: StepWork) -> tuple[float, float]:
        """Rows whose queries go to the keys: those that ask what is cached, and those that expand it."""
        if self.ways.latent:
            return work.num_tokens - work.expanded_tokens, work.expanded_tokens - work.local_tokens
        return work.num_tokens - work.local_tokens, 0.0

    def _gather_keys_s(self, work: StepWork) -> float:
        """New keys and values, which PCP ranks hand to one another, and cached ones for local rows."""
        model, topology = self.on.model, self.on.topology
        new = work.num_tokens * self._kv_layer_bytes
        sent = work.gathered_keys * key_gather_bytes_per_token(
            num_kv_heads=topology.kv_heads(0, model.heads).size,
            cached_dim=model.head_dims.cached,
            dcp_size=topology.dcp_size,
            dtype_bytes=ACTIVATION_BYTES,
        )
        handed = self.on.device.collective_s("ag", new, num_ranks=topology.pcp_size)
        return handed + (self._collective_s("ag", sent, topology.dcp_size) if sent else 0.0)

    def _experts_s(self, rows: float) -> float:
        """Shared experts, and of routed ones those that a row goes to: their weights are read once."""
        moe, w = self.on.model.moe, self.weights
        if moe is None:
            return 0.0
        touched = distinct_experts(
            moe.num_experts, experts_per_token=moe.experts_per_token, num_tokens=rows
        )
        kept = touched * w.num_experts / moe.num_experts
        visits = rows * moe.experts_per_token * w.num_experts / moe.num_experts
        routed = sum(
            self._operator_s(m.num_bytes * kept, 2 * m.params * visits, m.dtype) for m in w.expert
        )
        return routed + self._matrices_s(w.shared, rows)

    def _all_reduce_s(self, rows: float) -> float:
        whole = rows * self.on.model.hidden_size * ACTIVATION_BYTES
        return self.on.device.collective_s("ar", whole, num_ranks=self.on.topology.tp_size)

    def _logits_s(self, num_sampled: float) -> float:
        t = self.on.topology.tp_size
        whole = num_sampled * self.on.model.vocab_size * LOGIT_BYTES
        gathered = self.on.device.collective_s("ag", whole, num_ranks=t)
        return self._matrices_s((self.weights.head,), num_sampled) + gathered

    def _matrices_s(self, matrices: Sequence[Matrix], rows: float) -> float:
        return sum(self._operator_s(m.num_bytes, 2 * m.params * rows, m.dtype) for m in matrices)

    def _operator_s(self, read_bytes: float, flops: float, dtype: str) -> float:
        """One operator: what takes longer, and a kernel's least time."""
        rates = self.rates
        tflops = next(
            rates.gemm_tflops[kind] for kind in MULTIPLIED_IN[dtype] if kind in rates.gemm_tflops
        )
        return max(read_bytes / (rates.weights_gbs * 1e9), flops / (tflops * 1e12)) + self._kernel_s

    @property
    def _kernel_s(self) -> float:
        return self.rates.kernel_us * 1e-6

    def _collective_s(self, op: str, sent_bytes: float, num_ranks: int) -> float:
        """A collective in which a rank sends so many bytes: facts go by the whole buffer."""
        whole = sent_bytes * num_ranks / (num_ranks - 1)
        return self.on.device.collective_s(op, whole, num_ranks=num_ranks)

    def _local(self, keys: float) -> float:
        """Of the keys of sequences, what this rank keeps."""
        return keys / self.on.topology.dcp_size

    def _shared(self, pairs: float) -> float:
        """Of (row, key) pairs, what this rank computes: rows are shared by PCP, keys by DCP."""
        p, w = self.on.topology.pcp_size, self.on.topology.dcp_size
        return pairs / (p if w == 1 else w)
