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

import math
from collections.abc import Sequence
from copy import copy

from kvspan.cost.deployment import Deployment
from kvspan.cost.latents import NEVER, least_rows_to_expand
from kvspan.cost.memory import kv_bytes_per_local_token
from kvspan.cost.pace import Pace
from kvspan.cost.played import can_be_played, is_played
from kvspan.cost.prefill import PrefillRule
from kvspan.cost.rows import least_tokens_to_split
from kvspan.cost.team import NO_TEAM, TeamCost
from kvspan.cost.together import least_tokens_together, made_elements
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
    answered_params,
    asking_params,
    rank_weights,
)
from kvspan.cost.work import StepWork, Ways, distinct_experts

ACTIVATION_BYTES = 2
"""Activations are bfloat16."""
LOGIT_BYTES = 4
"""Logits are float32."""
TOKEN_BYTES = 8
"""Tokens travel as int64."""


class StepCost:
    """Times of a deployment's steps.

    Args:
        on: the deployment.
        ranks_are_homes: whether each rank of a DCP group makes queries and outputs of its own requests.
        in_python: whether steps that could be played are not.
    """

    def __init__(
        self, on: Deployment, *, ranks_are_homes: bool = False, in_python: bool = False
    ) -> None:
        self.on = on
        model, topology = on.model, on.topology
        self.weights: RankWeights = rank_weights(
            model,
            topology,
            replicate_q=on.replicate_q,
            dtypes=on.dtypes,
            expert_parallel=on.expert_parallel,
            ranks_are_homes=ranks_are_homes,
        )
        self._played = not in_python and can_be_played(on.dtypes)
        self._in_python = (
            StepCost(on, ranks_are_homes=ranks_are_homes, in_python=True) if self._played else self
        )
        self.rates = on.device.rates_of(topology.world_size, played=self._played)
        self._all_read = (
            self.rates
        )  # of work that all ranks share, even if some have no row of their own
        self.num_heads = topology.query_heads(0, model.heads).size
        self.ways = Ways(
            expand_from=NEVER if model.mla is None else least_rows_to_expand(model.mla),
            cut_from=least_tokens_to_split(
                topology.pcp_size, on.device.rates_of(topology.world_size, played=False)
            ),
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
        pace = Pace.of_device(on.device, topology)
        self._together_from = least_tokens_together(model, topology, pace, dtype_bytes=ACTIVATION_BYTES)
        team = TeamCost(
            model,
            topology,
            self.weights,
            Pace.of_device(on.device, topology, played=self._played),
            on.device,
        )
        self._team_rows = team.rows() if on.habits.teams else NO_TEAM
        local_token = kv_bytes_per_local_token(model, topology, kv_dtype_bytes=on.kv_dtype_bytes)
        self._kv_layer_bytes = local_token / model.num_layers

    def step_s(self, work: StepWork) -> float:
        """Seconds of a step."""
        return sum(self.parts_s(work).values())

    def parts_s(self, work: StepWork) -> dict[str, float]:
        """Seconds of a step by what they go to; all layers together, on the busiest PCP coordinate."""
        as_it_runs = self if is_played(work) else self._in_python
        return as_it_runs._while_some_wait(work.num_tokens)._parts_s(work)

    def _while_some_wait(self, num_rows: float) -> "StepCost":
        """These costs where coordinates without a row leave the memory to the others."""
        topology = self.on.topology
        busy = math.ceil(num_rows)
        if not 0 < busy < topology.pcp_size:
            return self
        some = copy(self)
        some.rates = self.rates.while_reading(busy * topology.tp_size)
        return some

    def _parts_s(self, work: StepWork) -> dict[str, float]:
        model, rates = self.on.model, self.rates
        rows = work.busiest_rows(self.on.topology.pcp_size)
        layers, w = model.num_layers, self.weights
        team = self._team_of(work)
        return {
            "projections": layers * (self._projections_s(work, rows) + self._absorb_s(work)),
            "attention": layers * self._attention_s(work),
            "gather queries": layers * self._gathers_s(work),
            "exchange": layers * self._exchanges_s(work),
            "gather keys": layers * self._gather_keys_s(work),
            "mlp": w.num_dense_layers * self._matrices_s(w.dense, rows, team=team),
            "experts": w.num_expert_layers * self._experts_s(rows, team=team),
            "all-reduce": (2 * layers + 1) * self._all_reduce_s(rows)
            + layers * self._team_s(rows, team),
            "logits": self._logits_s(work.num_sampled, team=team),
            "rows": layers * rates.layer_row_us * max(rows - 1, 0) * 1e-6,
            "host": (rates.step_us + rates.row_us * work.num_tokens) * 1e-6,
        }

    def gather_queries_s(self, num_tokens: float, *, latent: bool) -> float:
        """Seconds in which the queries of a layer come to all who hold keys for them.

        First the ranks of a coordinate gather the columns of its rows, if they do not make them all, and
        then the coordinates hand one another their rows.

        Args:
            num_tokens: rows of all coordinates.
            latent: whether they come as they ask latents.
        """
        topology, dims = self.on.topology, self.on.model.head_dims
        if topology.dcp_size == 1 or not num_tokens:
            return 0.0
        head_dim = dims.key if latent else dims.query
        makers = 1 if self.on.replicate_q else topology.tp_ranks_per_dcp
        beside = self._beside_s("gather") if makers * topology.pcp_size > 1 else 0.0
        sent = query_gather_bytes_per_row(
            num_heads=self.num_heads, head_dim=head_dim, dcp_size=makers, dtype_bytes=ACTIVATION_BYTES
        )
        columns = self._collective_s("ag", sent * num_tokens / topology.pcp_size, makers)
        whole = num_tokens * self.num_heads * head_dim * ACTIVATION_BYTES
        rows = self._whole_s("ag", whole, topology.pcp_size)
        return columns + rows + beside

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
            return self._collective_s("a2a", sent * num_tokens, w) + self._beside_s("a2a")
        lse = self.num_heads * LSE_BYTES * (w - 1)
        both = ag_rs_bytes_per_row(
            num_heads=self.num_heads, head_dim=dims.out, dcp_size=w, latent_dim=latent_dim
        )
        summed = (both - lse) * self.on.habits.sum_bytes / SUM_BYTES
        gathered = self._collective_s("ag", lse * num_tokens, w)
        scattered = self._collective_s("rs", summed * num_tokens, w)
        return gathered + scattered + self._beside_s("ag_rs")

    def _projections_s(self, work: StepWork, rows: float) -> float:
        """Projections of rows whose queries go to the keys, and of those that stay with their heads."""
        staying = self._own(work, work.local_tokens)
        going = rows - staying
        seconds = 0.0
        for whole, part in zip(self.weights.attention, self.weights.staying, strict=True):
            if whole == part:  # one product for all of them
                seconds += self._matrices_s((whole,), rows)
                continue
            seconds += self._matrices_s((whole,), going) if going or not staying else 0.0
            seconds += self._matrices_s((part,), staying) if staying else 0.0
        return seconds

    def _absorb_s(self, work: StepWork) -> float:
        """Asking latents, or making keys and values of them: of one's own, or of all for own heads."""
        mla, topology = self.on.model.mla, self.on.topology
        if mla is None:
            return 0.0
        up, absorbed = self.weights.absorb[0], work.num_tokens - work.expanded_tokens
        # Where queries travel, all of them ask here; else those of this coordinate.
        asking = absorbed if topology.dcp_size > 1 else self._own(work, absorbed)
        asked = asking * asking_params(mla, num_heads=self.num_heads)
        answered = answered_params(mla, topology, num_heads=self.num_heads)
        expanded = self._local(work.expanded_keys - work.local_keys)
        own_heads = work.local_keys / topology.tp_ranks_per_dcp / self._makers(work)
        rows = (asked + self._own(work, absorbed) * answered) / up.params + expanded + own_heads
        return self._matrices_s((up, up), rows / 2) if rows else 0.0

    def _attention_s(self, work: StepWork) -> float:
        """Attention over this rank's keys, as they are cached or as they are made of latents."""
        dims, rates = self.on.model.head_dims, self.rates
        asking = work.pairs - work.expanded_pairs
        flops = (
            2
            * self.num_heads
            * (
                (dims.key + dims.value) * self._shared(work, asking)
                + (dims.query + dims.out) * self._shared(work, work.expanded_pairs)
            )
        )
        read = self._read(work) * self._kv_layer_bytes
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
        num_kv_heads, cached = topology.kv_heads(0, model.heads).size, model.head_dims.cached
        gathers = 1 if self.ways.latent else 2  # keys and values go one by one
        new = work.num_tokens * num_kv_heads * cached * ACTIVATION_BYTES
        handed = self._whole_s("ag", new / gathers, topology.pcp_size)
        sent = key_gather_bytes_per_token(
            num_kv_heads=num_kv_heads,
            cached_dim=cached,
            dcp_size=topology.dcp_size,
            dtype_bytes=ACTIVATION_BYTES,
        )
        made = work.local_keys * made_elements(model, topology) * ACTIVATION_BYTES
        return (
            gathers * handed
            + self._collective_s("ag", work.gathered_keys * sent, topology.dcp_size)
            + self._whole_s("ag", made, self._makers(work))
        )

    def _makers(self, work: StepWork) -> int:
        """Ranks that share out making keys and values of latents for the same heads."""
        return self.on.topology.pcp_size if work.local_keys >= self._together_from else 1

    def _team_of(self, work: StepWork) -> int:
        """Coordinates that share weights out in a step; 1 = each works alone."""
        p = self.on.topology.pcp_size
        return p if work.only_decodes and round(work.busiest_rows(p)) in self._team_rows else 1

    def _team_s(self, rows: float, team: int) -> float:
        """What it takes a team to bring rows together, and their sums back."""
        whole = team * rows * self.on.model.hidden_size * ACTIVATION_BYTES
        return self._whole_s("ag", whole, team) + self._whole_s("rs", whole, team)

    def _experts_s(self, rows: float, *, team: int) -> float:
        """Shared experts, and of routed ones those that a row goes to: their weights are read once."""
        moe, w = self.on.model.moe, self.weights
        if moe is None:
            return 0.0
        shared, rows = self._matrices_s(w.shared, rows, team=team), rows * team
        touched = distinct_experts(
            moe.num_experts, experts_per_token=moe.experts_per_token, num_tokens=rows
        )
        kept = touched * w.num_experts / moe.num_experts
        visits = rows * moe.experts_per_token * w.num_experts / moe.num_experts
        routed = sum(
            self._operator_s(m.num_bytes * kept / team, 2 * m.params * visits / team, m.dtype, team=team)
            for m in w.expert
        )
        return routed + shared

    def _all_reduce_s(self, rows: float) -> float:
        whole = rows * self.on.model.hidden_size * ACTIVATION_BYTES
        return self._whole_s("ar", whole, self.on.topology.tp_size)

    def _logits_s(self, num_sampled: float, *, team: int) -> float:
        """Each PCP coordinate makes those of its own rows, and hands tokens round; a team makes all."""
        topology = self.on.topology
        here = math.ceil(num_sampled / topology.pcp_size)
        handed = self._whole_s("ag", num_sampled * TOKEN_BYTES, topology.pcp_size)
        whole = here * self.on.model.vocab_size * LOGIT_BYTES
        gathered = self._whole_s("ag", whole, topology.tp_size)
        return handed + self._matrices_s((self.weights.head,), here, team=team) + gathered

    def _matrices_s(self, matrices: Sequence[Matrix], rows: float, *, team: int = 1) -> float:
        """Products with some rows, or with so many of each rank of a team by its part of the weights."""
        return sum(
            self._operator_s(m.num_bytes / team, 2 * m.params * rows, m.dtype, team=team)
            for m in matrices
        )

    def _operator_s(self, read_bytes: float, flops: float, dtype: str, *, team: int = 1) -> float:
        """One operator: what takes longer, and a kernel's least time."""
        rates = self.rates if team == 1 else self._all_read
        tflops = next(
            rates.gemm_tflops[kind] for kind in MULTIPLIED_IN[dtype] if kind in rates.gemm_tflops
        )
        read_gbs = rates.read_gbs(flops / read_bytes) if read_bytes else rates.weights_gbs
        return max(read_bytes / (read_gbs * 1e9), flops / (tflops * 1e12)) + self._kernel_s

    @property
    def _kernel_s(self) -> float:
        return self.rates.kernel_us * 1e-6

    def _beside_s(self, meeting: str) -> float:
        """What ranks do before and after the collectives of a meeting."""
        return self.rates.meeting_us.get(meeting, 0.0) * 1e-6

    def _collective_s(self, op: str, sent_bytes: float, num_ranks: int) -> float:
        """A collective in which a rank sends so many bytes: facts go by the whole buffer."""
        whole = sent_bytes * num_ranks / max(num_ranks - 1, 1)
        return self._whole_s(op, whole, num_ranks)

    def _whole_s(self, op: str, whole_bytes: float, num_ranks: int) -> float:
        """A collective of so many bytes in all."""
        return self.on.device.collective_s(op, whole_bytes, num_ranks=num_ranks, played=self._played)

    def _local(self, keys: float) -> float:
        """Of the keys of sequences, what this rank keeps."""
        return keys / self.on.topology.dcp_size

    def _own(self, work: StepWork, amount: float) -> float:
        """Of what is shared out by rows, the busiest coordinate's part."""
        share = work.busiest_rows(self.on.topology.pcp_size) / work.num_tokens if amount else 0.0
        return amount * share

    def _read(self, work: StepWork) -> float:
        """Keys that attention reads here: a rank's share, or in a whole copy those of its own rows."""
        return self._own(work, work.keys) if self._has_copies else self._local(work.keys)

    def _shared(self, work: StepWork, pairs: float) -> float:
        """Of (row, key) pairs, what this rank computes: rows are shared by PCP, keys by DCP."""
        return self._own(work, pairs) if self._has_copies else self._local(pairs)

    @property
    def _has_copies(self) -> bool:
        """Whether each PCP coordinate has whole sequences, and so works for its own rows alone."""
        return self.on.topology.dcp_size == 1
