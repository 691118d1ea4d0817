"""Grouped-query attention of Llama and its family, sharded. A model of the family is a `DenseTraits`.

    x ─ norm ─ q k v ─ (q/k norm) ─ rotary ─ store k v ─ partial attention ─ exchange ─ o ─ + ─ ...
                │                                             │                │        │
           gather q or not                            over this rank's keys  DCP group  sum over TP

Attention is split over A = T / (W / P) attention-TP ranks by head, and over the W ranks of a DCP group
by sequence; a rank ends with its piece of the group's output, which is the input of its rows of `o`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kvspan.attention.exchange import make_exchange
from kvspan.attention.kv_store import KvStore
from kvspan.attention.rows import cut_pieces, gather_rows
from kvspan.comm.local import solo
from kvspan.config.model import ModelConfig
from kvspan.layers.linear import ColumnLinear, RowLinear, gather_columns
from kvspan.layers.norm import RMSNorm
from kvspan.layers.parameter import Target, linear_targets, whole
from kvspan.layers.rotary import Rotation
from kvspan.models.base import Batch, RankContext
from kvspan.models.decoder import Decoder, feed_forward
from kvspan.topology import Span, cuts


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseTraits:
    """What sets a model of the family apart.

    Args:
        qkv_bias: bias on q, k and v.
        o_bias: bias on the output projection.
        mlp_bias: bias on the MLP's layers.
        qk_norm: RMSNorm over each head of q and k before rotary embedding.
    """

    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False


def dense_decoder(config: ModelConfig, traits: DenseTraits, context: RankContext) -> Decoder:
    """A decoder of the family, or what one rank keeps of it.

    Args:
        config: sizes and settings.
        traits: what sets this architecture apart.
        context: ranks, groups, kernel and dtypes.
    """
    return Decoder(
        config,
        context,
        attention=lambda: DenseAttention(config, traits, context),
        feed_forward=lambda layer: feed_forward(config, layer, context, bias=traits.mlp_bias),
    )


class DenseAttention(nn.Module):
    """Grouped-query attention over a cache that is spread over the DCP group."""

    def __init__(self, config: ModelConfig, traits: DenseTraits, context: RankContext) -> None:
        super().__init__()
        self.config, self.traits = config, traits
        dim, storage = config.head_dim, context.storage
        self.query_heads = context.topology.query_heads(context.rank, config.heads)
        self.kv_heads = context.topology.kv_heads(context.rank, config.heads)
        width = self.query_heads.size * dim

        # With replicated queries each rank is a group of its own that projects all of them.
        self.rows = context.row_groups
        self.query_group = solo() if context.replicate_q else self.rows.columns
        self.query_parts = cuts(width, parts=self.query_group.size)
        rows = self.query_parts[self.query_group.rank].size + 2 * self.kv_heads.size * dim
        self.qkv = ColumnLinear(config.hidden_size, rows, bias=traits.qkv_bias, storage=storage)
        if traits.qk_norm:
            self.q_norm = RMSNorm(dim, eps=config.rms_norm_eps, storage=storage)
            self.k_norm = RMSNorm(dim, eps=config.rms_norm_eps, storage=storage)

        self.kernel = context.kernel
        self.scale = config.softmax_scale
        self.store = KvStore(context.cache, num_kv_heads=self.kv_heads.size, head_dim=dim)
        self.exchange = make_exchange(context.exchange, context.dcp)
        self.slices = tuple(cuts(width, parts=self.rows.columns.size))
        self.piece = self.slices[self.rows.columns.rank]
        self.out = RowLinear(
            self.piece.size, config.hidden_size, bias=traits.o_bias, group=context.tp, storage=storage
        )

    def forward(self, x: Tensor, rotation: Rotation, batch: Batch) -> Tensor:
        """[R, hidden_size] -> [R, hidden_size]."""
        query, key, value = self._project(x)
        if self.traits.qk_norm:
            query, key = self.q_norm(query), self.k_norm(key)
        query, key = rotation.apply(query), rotation.apply(key)
        key, value = gather_rows(self.rows.pcp, batch.rows, key, value)
        (query,) = gather_rows(self.rows.asking, batch.asking, query)
        self.store.write(key, value, batch.writes)
        seen = self.store.seen(batch.keys)
        partial, lse = self.kernel(
            query.to(seen.keys.dtype), seen.keys, seen.values, seen.index, self.scale
        )
        pieces = cut_pieces(batch.asking, self.slices)
        piece = self.exchange.start(partial, lse, pieces).wait()
        out: Tensor = self.out(piece.to(x.dtype))
        return out

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[R, H / A, D] queries of the group, and [R, Hkv / A, D] keys and values of the rank."""
        kv_width = self.kv_heads.size * self.config.head_dim
        query_width = self.query_parts[self.query_group.rank].size
        query, key, value = torch.split(self.qkv(x), [query_width, kv_width, kv_width], dim=-1)
        query = gather_columns(query, self.query_group, self.query_parts)
        dims = (-1, self.config.head_dim)
        return query.unflatten(1, dims), key.unflatten(1, dims), value.unflatten(1, dims)

    def weight_targets(self, theirs: str, ours: str) -> dict[str, Target]:
        """Targets of the projections: fused q, k, v here, three tensors in the checkpoint."""
        size, dim, bias = self.config.hidden_size, self.config.head_dim, self.traits.qkv_bias
        first = self.query_heads.start * dim  # where the group's queries begin in the checkpoint
        query = self.query_parts[self.query_group.rank].shifted(first)
        kv = Span(self.kv_heads.start * dim, self.kv_heads.stop * dim)
        targets: dict[str, Target] = {}
        at = 0
        for name, part, heads in (
            ("q_proj", query, self.config.num_heads),
            ("k_proj", kv, self.config.num_kv_heads),
            ("v_proj", kv, self.config.num_kv_heads),
        ):
            shape = (heads * dim, size)
            targets |= linear_targets(
                f"{theirs}{name}", f"{ours}qkv", shape, dim=0, part=part, at=at, bias=bias
            )
            at += part.size
        targets |= linear_targets(
            f"{theirs}o_proj",
            f"{ours}out",
            (size, self.config.num_heads * dim),
            dim=1,
            part=self.piece.shifted(first),
            bias=self.traits.o_bias,
        )
        if self.traits.qk_norm:
            for name in ("q_norm", "k_norm"):
                targets[f"{theirs}{name}.weight"] = whole(f"{ours}{name}.weight", (dim,))
        return targets
