"""Multi-head latent attention, sharded: DeepSeek-V2 and V3, R1, Kimi K2.

The cache holds one latent a token, and a rotated part of the key that all heads share. The weights that
would make each head's keys of a latent are applied to the query instead (absorbed), and those that would
make its values are applied to what attention gives, so that heads see one KV head: the latents.

    x ─ norm ─┬─ queries ─ gather or not ─ absorb ─┐
              └─ latent ─ norm, rotary ─ store ────┴─ partial attention ─ exchange ─ values ─ o ─ + ─ ...
                                                            │                │
                                                  over this rank's keys   of latents, for whole heads

A rank owns a slice of the output's columns, which may begin inside a head. The latents of the heads that
the slice touches are exchanged whole; their values are made after the merge, and then the slice is cut.
"""

import torch
from torch import Tensor, nn

from kvspan.attention.exchange import make_exchange
from kvspan.attention.kv_store import LatentStore
from kvspan.comm.group import Piece
from kvspan.comm.local import solo
from kvspan.config.mla import MlaConfig
from kvspan.config.model import ModelConfig
from kvspan.errors import ModelError
from kvspan.layers.linear import ColumnLinear, RowLinear, Storage, gather_columns
from kvspan.layers.norm import RMSNorm
from kvspan.layers.parameter import Target, linear_targets, sliced, whole
from kvspan.layers.rotary import Rotation
from kvspan.models.base import Batch, RankContext
from kvspan.models.decoder import Decoder, feed_forward
from kvspan.topology import Span, cuts, touched_heads

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

        # With replicated queries each rank is a group of its own that projects all of them.
        self.query_group = solo() if context.replicate_q else context.dcp
        self.query_parts = cuts(self.heads.size * config.head_dim, parts=self.query_group.size)
        part = self.query_parts[self.query_group.rank].shifted(self.heads.start * config.head_dim)
        self.query = LatentQuery(config, mla, part, storage)
        self.down = ColumnLinear(
            hidden, rank + mla.rope_dim, bias=config.attention_bias, storage=storage
        )
        self.latent_norm = RMSNorm(rank, eps=LATENT_EPS, storage=storage)
        self.up = storage.empty(self.heads.size * (mla.nope_dim + mla.value_dim), rank)

        self.kernel = context.kernel
        self.store = LatentStore(
            key_dim=config.head_dims.key,
            value_dim=config.head_dims.value,
            block_size=context.block_size,
            dtype=context.kv_dtype,
            device=storage.device,
        )
        self.exchange = make_exchange(context.exchange, context.dcp)
        slices = cuts(self.heads.size * mla.value_dim, parts=context.dcp.size)
        self.slice = slices[context.dcp.rank]
        self.touched = touched_heads(self.slice, mla.value_dim)
        self.pieces = [_latent_piece(columns, mla) for columns in slices]
        self.out = RowLinear(
            self.slice.size, hidden, bias=config.attention_bias, group=context.tp, storage=storage
        )

    def forward(self, x: Tensor, rotation: Rotation, batch: Batch) -> Tensor:
        """[R, hidden_size] -> [R, hidden_size]."""
        self.store.write(self._keys(x, rotation), batch.writes)
        keys = self.store.keys
        partial, lse = self.kernel(
            self._queries(x, rotation).to(keys.dtype),
            keys,
            self.store.values,
            batch.keys,
            self.config.softmax_scale,
        )
        latents = self.exchange.start(partial, lse, self.pieces).wait()
        out: Tensor = self.out(self._values(latents.to(x.dtype)))
        return out

    def _keys(self, x: Tensor, rotation: Rotation) -> Tensor:
        """[R, kv_lora_rank + rope_dim]: each row's normed latent, and the rotated part after it."""
        sizes = [self.mla.kv_lora_rank, self.mla.rope_dim]
        latent, rotated = torch.split(self.down(x), sizes, dim=-1)
        rotated = rotation.apply(rotated[:, None])[:, 0]
        return torch.cat([self.latent_norm(latent), rotated], dim=-1)

    def _queries(self, x: Tensor, rotation: Rotation) -> Tensor:
        """[R, H / A, kv_lora_rank + rope_dim]: queries of the group that ask latents, not keys."""
        query = gather_columns(self.query(x), self.query_group, self.query_parts)
        query = query.reshape(len(x), self.heads.size, self.config.head_dim)
        plain, rotated = torch.split(query, [self.mla.nope_dim, self.mla.rope_dim], dim=-1)
        up_keys, _ = self._up()
        return torch.cat([torch.einsum("rhd,hdl->rhl", plain, up_keys), rotation.apply(rotated)], dim=-1)

    def _values(self, latents: Tensor) -> Tensor:
        """[R, touched heads * kv_lora_rank] -> [R, columns of this rank's slice]."""
        latents = latents.view(len(latents), self.touched.size, self.mla.kv_lora_rank)
        _, up_values = self._up()
        up_values = up_values[self.touched.start : self.touched.stop]
        values = torch.einsum("rhl,hdl->rhd", latents, up_values).flatten(1)
        inside = self.slice.shifted(-self.touched.start * self.mla.value_dim)
        return values[:, inside.start : inside.stop]

    def _up(self) -> tuple[Tensor, Tensor]:
        """What makes keys and values of latents: [H / A, nope_dim or value_dim, kv_lora_rank]."""
        mla = self.mla
        up = self.up.view(self.heads.size, mla.nope_dim + mla.value_dim, mla.kv_lora_rank)
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
                f"{ours}up",
                (config.num_heads * up_rows, mla.kv_lora_rank),
                dim=0,
                part=Span(heads.start * up_rows, heads.stop * up_rows),
            ),
            **linear_targets(
                f"{theirs}o_proj",
                f"{ours}out",
                (size, config.num_heads * mla.value_dim),
                dim=1,
                part=self.slice.shifted(heads.start * mla.value_dim),
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
        self.up = ColumnLinear(width, part.size, bias=False, storage=storage)

    def forward(self, x: Tensor) -> Tensor:
        """[R, hidden_size] -> [R, columns of the part]."""
        query: Tensor = self.up(self.norm(self.down(x)))
        return query

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


def _latent_piece(columns: Span, mla: MlaConfig) -> Piece:
    """The latents, flattened head by head, that a slice of the output's columns is made from."""
    heads = touched_heads(columns, mla.value_dim)
    return Piece(slice(None), Span(heads.start * mla.kv_lora_rank, heads.stop * mla.kv_lora_rank))
