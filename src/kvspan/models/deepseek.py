"""Multi-head latent attention, sharded: DeepSeek-V2 and V3, R1, Kimi K2.

The cache holds one latent a token, and a rotated part of the key that all heads share. There are three
ways to attend to it, with the same result:

    absorbed   few rows: what makes a head's keys of latents is applied to its query, and what makes its
               values to the result, so that all heads see one KV head, this rank's latents
    expanded   many rows: keys and values of all heads are made of this rank's latents, a workspace at a
               time, and forgotten again
    gathered   the latents of all ranks come here a workspace at a time, and keys and values are made of
               them for this rank's own heads; see `attention.prefill`

    x ─ norm ─┬─ queries ─ gather or not ─┬─ absorbed or expanded, over this rank's keys ─ exchange ─┬─ o
              └─ latent, rotary ─ store ──┴─ gathered, for own heads ────────────────────────────────┘

A rank owns a slice of the output's columns, which may begin inside a head. Of absorbed rows the latents
of the heads that the slice touches are exchanged whole; their values are made after the merge, and then
the slice is cut.
"""

from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kvspan.attention.contract import KeyIndex
from kvspan.attention.kv_store import LatentStore, Seen
from kvspan.attention.merge import Merged
from kvspan.attention.prefill import GatherPlan, Makers, OwnHeads, row_numbers
from kvspan.attention.rows import Reach, cut_pieces, make_reaches
from kvspan.config.mla import MlaConfig
from kvspan.config.model import ModelConfig
from kvspan.cost.latents import least_rows_to_expand
from kvspan.errors import ModelError
from kvspan.layers.linear import Attended, ColumnLinear, OutLinear, PlainMatrix, SplitLinear, Storage
from kvspan.layers.norm import RMSNorm
from kvspan.layers.parameter import Target, linear_targets, sliced, whole
from kvspan.layers.rotary import Rotation
from kvspan.layers.rows import gather_rows, row_ops, some_rows, together
from kvspan.models.base import Asking, Batch, RankContext
from kvspan.models.decoder import Decoder, feed_forward
from kvspan.models.queries import GroupQueries
from kvspan.topology import Span, touched_heads

LATENT_EPS = 1e-6
"""Epsilon of the norms over latents: that of DeepSeek's code, whatever `rms_norm_eps` says."""


def deepseek(config: ModelConfig, context: RankContext) -> Decoder:
    """DeepSeek-V2, V3 and what descends from them.

    Raises:
        ModelError: the config has no latent attention.
    """
    mla = config.mla
    if mla is None:
        raise ModelError(f"{config.architecture} has latent attention, but its config no kv_lora_rank.")
    return Decoder(
        config,
        context,
        attention=lambda: LatentAttention(config, mla, context),
        feed_forward=lambda layer: feed_forward(config, layer, context, bias=config.mlp_bias),
    )


class LatentAttention(nn.Module):
    """Latent attention over a cache that is spread over the DCP group."""

    def __init__(self, config: ModelConfig, mla: MlaConfig, context: RankContext) -> None:
        super().__init__()
        self.config, self.mla = config, mla
        storage, hidden, rank = context.storage, config.hidden_size, mla.kv_lora_rank
        self.heads = context.topology.query_heads(context.rank, config.heads)
        self.all_heads = Span(0, self.heads.size)

        self.rows = context.row_groups
        width = self.heads.size * mla.value_dim
        self.reaches = make_reaches(context.exchange, self.rows, context.dcp, width=width)
        self.cuts = tuple(LatentCut.of(reach, mla) for reach in self.reaches)
        self.kept, self.spread = self.reaches[1].slice, self.cuts[0]

        self.queries = GroupQueries(
            context, num_heads=self.heads.size, head_dim=config.head_dim, touched=self.spread.touched
        )
        part = self.queries.part.shifted(self.heads.start * config.head_dim)
        self.query = LatentQuery(config, mla, part, storage)
        self.down = ColumnLinear(
            hidden, rank + mla.rope_dim, bias=config.attention_bias, storage=storage
        )
        self.latent_norm = RMSNorm(rank, eps=LATENT_EPS, storage=storage)
        up_rows = self.heads.size * (mla.nope_dim + mla.value_dim)
        self.up = PlainMatrix(up_rows, rank, storage=storage)

        self.kernel = context.kernel
        self.store = LatentStore(context.cache, latent_dim=rank, rotary_dim=mla.rope_dim)
        self.block_size, self.workspace_tokens = context.cache.block_size, context.workspace_tokens
        self.least_rows_to_expand = least_rows_to_expand(mla)
        self.own_heads = OwnHeads(
            context.kernel,
            self.store,
            context.dcp,
            make=lambda vectors: self._made(vectors[:, 0], self.spread.own),
            form=lambda vectors, made: self._formed(vectors.transpose(0, 1), made[None]),
            makers=Makers(self.rows.pcp, context.together_tokens),
            value_dim=mla.value_dim,
            scale=config.softmax_scale,
        )
        self.out = OutLinear(
            self.kept.size, hidden, bias=config.attention_bias, group=context.tp, storage=storage
        )

    def forward(self, x: Tensor, rotation: Rotation, batch: Batch) -> Tensor:
        """[R, hidden_size] -> [R, hidden_size]."""
        num_rows = len(x)
        x, rotation = some_rows(x, batch.attending), rotation.of(batch.attending)
        keys = self._keys(x, rotation)
        projected = self.queries.project(self.query.up, self.query.latents(x), batch)
        (keys,) = gather_rows(self.rows.pcp, batch.row_sizes, keys)
        self.store.write(keys, batch.writes)
        attended: list[Attended] = []
        by_reach = batch.by_reach(projected.asking)
        reaches = zip(self.reaches, self.cuts, batch.asking, by_reach, strict=True)
        for reach, cut, asking, columns in reaches:
            if asking.keys.num_rows:  # the same on all ranks: an exchange without rows does not run
                rows = asking.rows
                query = rotation.of(rows).apply(self.queries.all_heads(columns))
                values = self._over_shards(query, asking, reach, cut)
                attended.append(Attended(rows, values, self._inputs(cut)))
        if batch.gathered.num_keys:
            rows = batch.gathered.rows
            query = rotation.of(rows).apply(self.queries.own_heads(projected.gathered))
            values = self._gathered(query, keys[batch.gathered.keys], batch.gathered).to(x.dtype)
            attended.append(Attended(rows, values, self._inputs(self.spread)))
        if not attended:  # a rank without rows helps to sum all the same
            nothing = x.new_empty(0, self.spread.slice.size)
            attended.append(Attended(slice(0, 0), nothing, self._inputs(self.spread)))
        out: Tensor = self.out(attended, size=len(x), own=batch.attending, num_rows=num_rows)
        return out

    def _inputs(self, cut: "LatentCut") -> Span:
        """A slice of the group's columns, among those that this rank keeps."""
        return cut.slice.shifted(-self.kept.start)

    def _over_shards(self, query: Tensor, asking: Asking, reach: Reach, cut: "LatentCut") -> Tensor:
        """Attention over keys that stay on their ranks.

        Args:
            query: [own rows, H / A, nope_dim + rope_dim].
            asking: whose they are, and what everybody's see here.
            reach: of the rows.
            cut: of the reach.

        Returns:
            [own rows, columns of this rank's slice].
        """
        seen, own = self.store.seen(asking.keys), reach.group.rank
        num_own, attended = len(query), []
        (query,) = gather_rows(reach.group, asking.sizes, query)
        borders = np.cumsum([0, *asking.sizes])
        sizes = np.diff(seen.index.row_starts)
        few = sizes < self.least_rows_to_expand
        for way, slices, finish, chosen in (
            (self._absorbed, cut.latent_slices, lambda latents: self._values_of(latents, cut), few),
            (self._expanded, reach.slices, _as_they_are, ~few),
        ):
            if chosen.any():
                places, index = seen.index.chosen(chosen)
                ends = np.searchsorted(places, borders)
                mine = row_numbers(places[ends[own] : ends[own + 1]] - borders[own], query.device)
                pieces = cut_pieces(tuple(np.diff(ends).tolist()), slices)
                asked = some_rows(query, row_numbers(places, query.device))
                partial, lse = way(asked, replace(seen, index=index))
                piece = reach.exchange.start(partial, lse, pieces).wait()
                attended.append((mine, finish(piece.to(query.dtype))))
        return together(num_own, attended)

    def _gathered(self, query: Tensor, keys: Tensor, plan: GatherPlan) -> Tensor:
        """[n, columns of this rank's slice]: attention of the heads that it touches."""
        new = self.store.rounded(keys)
        values = self.own_heads.attend(query.to(new.dtype), new, plan).flatten(1)
        return self.spread.columns_of(values)

    def _absorbed(self, query: Tensor, seen: Seen) -> tuple[Tensor, Tensor]:
        """Partials of rows that ask the latents themselves: latents [n, H / A, kv_lora_rank]."""
        plain, rotated = torch.split(query, [self.mla.nope_dim, self.mla.rope_dim], dim=-1)
        ops, (up_keys, _) = row_ops(query), self._up()
        asking = ops.side_by_side([ops.head_sums(plain, up_keys), rotated])
        return self.kernel(
            asking.to(seen.dtype), seen.keys, seen.values, seen.index, self.config.softmax_scale
        )

    def _values_of(self, latents: Tensor, cut: "LatentCut") -> Tensor:
        """[n, touched heads * kv_lora_rank], merged -> [n, columns of this rank's slice]."""
        heads = cut.own
        latents = latents.view(len(latents), heads.size, self.mla.kv_lora_rank)
        up_values = self._up()[1][heads.start : heads.stop]
        return cut.columns_of(row_ops(latents).head_dots(latents, up_values).flatten(1))

    def _expanded(self, query: Tensor, seen: Seen) -> tuple[Tensor, Tensor]:
        """Partials of rows over keys and values made for them: values [n, H / A, value_dim]."""
        query = query.to(seen.dtype)
        parts = [
            self._over_workspaces(query[rows], replace(seen, index=index))
            for rows, index in seen.index.each()
        ]
        partial, lse = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
        return partial, lse

    def _over_workspaces(self, query: Tensor, seen: Seen) -> tuple[Tensor, Tensor]:
        """Partial attention of one sequence's rows.

        Args:
            query: [n, H / A, nope_dim + rope_dim].
            seen: its latents; the index is of the sequence alone.

        Returns:
            out [n, H / A, value_dim] in the query's dtype, and lse [n, H / A] float32.
        """
        index, size = seen.index, self.block_size
        blocks = index.tables[0][: -(-int(index.last.max()) // size)]
        at_once = self.workspace_tokens // size
        merged = Merged(*query.shape[:2], self.mla.value_dim, device=query.device)
        for start in range(0, len(blocks), at_once):
            blocks_here = seen.key_blocks(blocks[start : start + at_once])
            vectors = blocks_here[:, 0]
            keys, values = self._formed(vectors, self._made(vectors, self.all_heads))
            first, last = (
                np.clip(bound - start * size, 0, len(keys) * size) for bound in (index.first, index.last)
            )
            table = torch.arange(len(keys), device=query.device)
            here = KeyIndex(index.row_starts, (table,), first, last)
            part = self.kernel(query, keys, values, here, self.config.softmax_scale)
            merged.add(slice(None), *part)
        return merged.out.to(query.dtype), merged.lse

    def _made(self, vectors: Tensor, heads: Span) -> Tensor:
        """What is made of cached latents, for some of the group's heads, h of them.

        Args:
            vectors: [..., kv_lora_rank + rope_dim].
            heads: which.

        Returns:
            [..., h * (nope_dim + value_dim)] in the vectors' dtype.
        """
        rows = _columns(heads, self.mla.nope_dim + self.mla.value_dim)
        up = self.up.weight[rows.start : rows.stop]
        latents = vectors[..., : self.mla.kv_lora_rank].to(up.dtype)
        return F.linear(latents, up).to(vectors.dtype)

    def _formed(self, vectors: Tensor, made: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values.

        Args:
            vectors: [b, t, kv_lora_rank + rope_dim].
            made: of them, [b, t, h * (nope_dim + value_dim)].

        Returns:
            [b, h, t, nope_dim + rope_dim] and [b, h, t, value_dim].
        """
        mla = self.mla
        width = mla.nope_dim + mla.value_dim
        by_head = made.view(*made.shape[:2], made.shape[-1] // width, width).transpose(1, 2)
        plain, values = torch.split(by_head, [mla.nope_dim, mla.value_dim], dim=-1)
        rotated = vectors[:, None, :, mla.kv_lora_rank :].expand(-1, by_head.shape[1], -1, -1)
        return torch.cat([plain, rotated], dim=-1), values.contiguous()

    def _keys(self, x: Tensor, rotation: Rotation) -> Tensor:
        """[R, kv_lora_rank + rope_dim]: each row's normed latent, and the rotated part after it."""
        sizes = [self.mla.kv_lora_rank, self.mla.rope_dim]
        latent, rotated = torch.split(self.down(x), sizes, dim=-1)
        rotated = rotation.apply(rotated[:, None])[:, 0]
        return row_ops(x).side_by_side([self.latent_norm(latent), rotated])

    def _up(self) -> tuple[Tensor, Tensor]:
        """What makes keys and values of latents: [H / A, nope_dim or value_dim, kv_lora_rank]."""
        mla = self.mla
        up = self.up.weight.view(self.heads.size, mla.nope_dim + mla.value_dim, mla.kv_lora_rank)
        return up[:, : mla.nope_dim], up[:, mla.nope_dim :]

    def weight_targets(self, theirs: str, ours: str) -> dict[str, Target]:
        """Targets of the projections."""
        config, mla = self.config, self.mla
        size, heads, bias = config.hidden_size, self.heads, config.attention_bias
        up_rows = mla.nope_dim + mla.value_dim
        down_rows = mla.kv_lora_rank + mla.rope_dim
        return {
            **self.query.weight_targets(theirs, f"{ours}query."),
            **linear_targets(
                f"{theirs}kv_a_proj_with_mqa",
                f"{ours}down",
                (down_rows, size),
                dim=0,
                part=Span(0, down_rows),
                bias=bias,
            ),
            f"{theirs}kv_a_layernorm.weight": whole(f"{ours}latent_norm.weight", (mla.kv_lora_rank,)),
            f"{theirs}kv_b_proj.weight": sliced(
                f"{ours}up.weight",
                (config.num_heads * up_rows, mla.kv_lora_rank),
                dim=0,
                part=Span(heads.start * up_rows, heads.stop * up_rows),
            ),
            **linear_targets(
                f"{theirs}o_proj",
                f"{ours}out",
                (size, config.num_heads * mla.value_dim),
                dim=1,
                part=self.kept.shifted(heads.start * mla.value_dim),
                bias=bias,
            ),
        }


class LatentQuery(nn.Module):
    """Some columns of all heads' queries, through a latent of their own or in one step.

    Args:
        config: sizes.
        mla: sizes of latents.
        part: columns of the flattened head-by-dim axis.
    """

    def __init__(self, config: ModelConfig, mla: MlaConfig, part: Span, storage: Storage) -> None:
        super().__init__()
        self.config, self.mla, self.part = config, mla, part
        self.down: nn.Module = nn.Identity()
        self.norm: nn.Module = nn.Identity()
        if mla.q_lora_rank is not None:
            bias = config.attention_bias
            self.down = ColumnLinear(config.hidden_size, mla.q_lora_rank, bias=bias, storage=storage)
            self.norm = RMSNorm(mla.q_lora_rank, eps=LATENT_EPS, storage=storage)
        width = mla.q_lora_rank or config.hidden_size
        self.up = SplitLinear(width, part.size, bias=False, storage=storage)

    def latents(self, x: Tensor) -> Tensor:
        """[R, hidden_size] -> [R, width of a query's latent], of which `up` makes columns."""
        made: Tensor = self.norm(self.down(x))
        return made

    def weight_targets(self, theirs: str, ours: str) -> dict[str, Target]:
        """Targets: the latent's layers are whole on every rank."""
        size, rank = self.config.hidden_size, self.mla.q_lora_rank
        rows = self.config.num_heads * self.config.head_dim
        if rank is None:
            return {f"{theirs}q_proj.weight": self._up_target(ours, (rows, size))}
        return {
            **linear_targets(
                f"{theirs}q_a_proj",
                f"{ours}down",
                (rank, size),
                dim=0,
                part=Span(0, rank),
                bias=self.config.attention_bias,
            ),
            f"{theirs}q_a_layernorm.weight": whole(f"{ours}norm.weight", (rank,)),
            f"{theirs}q_b_proj.weight": self._up_target(ours, (rows, rank)),
        }

    def _up_target(self, ours: str, shape: tuple[int, int]) -> Target:
        return sliced(f"{ours}up.weight", shape, dim=0, part=self.part)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentCut:
    """What latent attention needs to know of a reach's slices.

    Args:
        touched: for each rank that shares the columns, the heads of which its slice has a part.
        latent_slices: the columns of those heads' latents, which travel whole.
        own: the heads that this rank's slice touches.
        slice: this rank's.
        inside: the slice among the columns of those heads.
    """

    touched: tuple[Span, ...]
    latent_slices: tuple[Span, ...]
    own: Span
    slice: Span
    inside: Span

    @classmethod
    def of(cls, reach: Reach, mla: MlaConfig) -> Self:
        """That of a reach."""
        touched = tuple(touched_heads(its, mla.value_dim) for its in reach.slices)
        own = touched[reach.own]
        return cls(
            touched=touched,
            latent_slices=tuple(_columns(heads, mla.kv_lora_rank) for heads in touched),
            own=own,
            slice=reach.slice,
            inside=reach.slice.shifted(-own.start * mla.value_dim),
        )

    def columns_of(self, values: Tensor) -> Tensor:
        """[n, touched heads * value_dim] -> [n, columns of this rank's slice]."""
        return values[:, self.inside.start : self.inside.stop]


def _as_they_are(values: Tensor) -> Tensor:
    return values


def _columns(heads: Span, width: int) -> Span:
    """Where heads lie on an axis that has `width` elements of each, head by head."""
    return Span(heads.start * width, heads.stop * width)
