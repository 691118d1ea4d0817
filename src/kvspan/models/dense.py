"""Grouped-query attention of Llama and its family, sharded. A model of the family is a `DenseTraits`.

    x ─ norm ─ q k v ─ (q/k norm) ─ rotary ─ store k v ─ partial attention ─ exchange ─ o ─ + ─ ...
                │                                             │                │        │
           gather q or not                            over this rank's keys  DCP group  sum over TP

Rows whose keys are gathered skip the exchange: see `attention.prefill`.

Attention is split over A = T / (W / P) attention-TP ranks by head, and over the W ranks of a DCP group
by sequence; a rank ends with its piece of the group's output, which is the input of its rows of `o`. A
rank that is a home keeps all of the group's `q` and `o`, and has its local rows' output whole.
"""

from dataclasses import dataclass

from torch import Tensor, nn

from kvspan.attention.kv_store import KvStore
from kvspan.attention.prefill import OwnHeads
from kvspan.attention.rows import Reach, cut_pieces, make_reaches
from kvspan.config.model import ModelConfig
from kvspan.layers.linear import Attended, OutLinear, SplitLinear
from kvspan.layers.norm import RMSNorm
from kvspan.layers.parameter import Target, linear_targets, whole
from kvspan.layers.rotary import Rotation
from kvspan.layers.rows import gather_rows, some_rows
from kvspan.models.base import Asking, Batch, RankContext
from kvspan.models.decoder import Decoder, feed_forward
from kvspan.models.queries import GroupQueries
from kvspan.topology import Span, touched_heads


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

        self.rows = context.row_groups
        self.reaches = make_reaches(context.exchange, self.rows, context.dcp, width=width)
        spread, local = self.reaches
        touched = [touched_heads(its, dim) for its in spread.slices]
        self.piece, self.touched, self.kept = spread.slice, touched[spread.own], local.slice
        self.queries = GroupQueries(
            context, num_heads=self.query_heads.size, head_dim=dim, touched=touched
        )
        keys = Span(0, self.kv_heads.size * dim).shifted(self.queries.part.size)
        self.keys, self.values = keys, keys.shifted(keys.size)
        rows = self.values.stop
        self.qkv = SplitLinear(config.hidden_size, rows, bias=traits.qkv_bias, storage=storage)
        self.q_norm, self.k_norm = (
            RMSNorm(dim, eps=config.rms_norm_eps, storage=storage) if traits.qk_norm else nn.Identity()
            for _ in range(2)
        )

        self.kernel = context.kernel
        self.scale = config.softmax_scale
        self.store = KvStore(context.cache, num_kv_heads=self.kv_heads.size, head_dim=dim)
        self.own_kv = _shared_by(self.touched, self.query_heads.size // self.kv_heads.size)
        self.own_heads = OwnHeads(
            context.kernel,
            self.store,
            context.dcp,
            make=lambda vectors: vectors[:, self.own_kv],
            form=lambda _, made: _as_keys(made),
            value_dim=dim,
            scale=self.scale,
        )
        self.out = OutLinear(
            self.kept.size, config.hidden_size, bias=traits.o_bias, group=context.tp, storage=storage
        )

    def forward(self, x: Tensor, rotation: Rotation, batch: Batch) -> Tensor:
        """[R, hidden_size] -> [R, hidden_size]."""
        num_rows = len(x)
        x, rotation = some_rows(x, batch.attending), rotation.of(batch.attending)
        projected = self.queries.project(self.qkv, x, batch, beside=(self.keys, self.values))
        dims = (len(x), self.kv_heads.size, self.config.head_dim)
        key, value = (its.reshape(dims) for its in projected.beside)
        key = rotation.apply(self.k_norm(key))
        key, value = gather_rows(self.rows.pcp, batch.row_sizes, key, value)
        self.store.write(key, value, batch.writes)
        attended: list[Attended] = []
        by_reach = batch.by_reach(projected.asking)
        for reach, asking, columns in zip(self.reaches, batch.asking, by_reach, strict=True):
            if asking.keys.num_rows:  # the same on all ranks: an exchange without rows does not run
                rows = asking.rows
                query = self._rotated(self.queries.all_heads(columns), rotation.of(rows))
                values = self._over_shards(query, asking, reach).to(x.dtype)
                attended.append(Attended(rows, values, self._inputs(reach.slice)))
        if batch.gathered.num_keys:
            rows, its = batch.gathered.rows, batch.gathered.keys
            query = self._rotated(self.queries.own_heads(projected.gathered), rotation.of(rows))
            new = self.store.rounded(key[its], value[its])
            values = self.own_heads.attend(query.to(new.dtype), new, batch.gathered).flatten(1)
            start = self.piece.start - self.touched.start * self.config.head_dim
            values = values[:, start : start + self.piece.size].to(x.dtype)
            attended.append(Attended(rows, values, self._inputs(self.piece)))
        if not attended:  # a rank without rows helps to sum all the same
            nothing = x.new_empty(0, self.piece.size)
            attended.append(Attended(slice(0, 0), nothing, self._inputs(self.piece)))
        out: Tensor = self.out(attended, size=len(x), own=batch.attending, num_rows=num_rows)
        return out

    def _inputs(self, columns: Span) -> Span:
        """Some of the group's columns, among those that this rank keeps."""
        return columns.shifted(-self.kept.start)

    def _over_shards(self, query: Tensor, asking: Asking, reach: Reach) -> Tensor:
        """[n, columns of the piece]: attention over keys that stay on their ranks."""
        (query,) = gather_rows(reach.group, asking.sizes, query)
        seen = self.store.seen(asking.keys)
        partial, lse = self.kernel(query.to(seen.dtype), seen.keys, seen.values, seen.index, self.scale)
        pieces = cut_pieces(asking.sizes, reach.slices)
        return reach.exchange.start(partial, lse, pieces).wait()

    def _rotated(self, query: Tensor, rotation: Rotation) -> Tensor:
        """[n, h, D]: queries as they ask, after norm and rotary embedding."""
        return rotation.apply(self.q_norm(query))

    def weight_targets(self, theirs: str, ours: str) -> dict[str, Target]:
        """Targets of the projections: fused q, k, v here, three tensors in the checkpoint."""
        size, dim, bias = self.config.hidden_size, self.config.head_dim, self.traits.qkv_bias
        first = self.query_heads.start * dim  # where the group's queries begin in the checkpoint
        query = self.queries.part.shifted(first)
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
            part=self.kept.shifted(first),
            bias=self.traits.o_bias,
        )
        if self.traits.qk_norm:
            for name in ("q_norm", "k_norm"):
                targets[f"{theirs}{name}.weight"] = whole(f"{ours}{name}.weight", (dim,))
        return targets


def _as_keys(cached: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values [1, h, t, D] of what is cached of some heads, [t, h, 2 D]."""
    keys, values = cached.transpose(0, 1)[None].chunk(2, dim=-1)
    return keys, values


def _shared_by(heads: Span, group: int) -> list[int]:
    """KV heads of some query heads, of which `group` share one: as kernels want it, equally many each.

    Returns:
        Each KV head once where that is so; the KV head of each query head where it is not.
    """
    of_each = [head // group for head in range(heads.start, heads.stop)]
    once = sorted(set(of_each))
    return once if len({of_each.count(kv) for kv in once}) == 1 else of_each
