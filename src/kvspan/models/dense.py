"""The dense decoder of Llama and its family, sharded. A model of the family is a `DenseTraits`.

    x ─ norm ─ q k v ─ (q/k norm) ─ rotary ─ store k v ─ partial attention ─ exchange ─ o ─ + ─ ...
                │                                             │                │        │
           gather q or not                            over this rank's keys  DCP group  sum over TP

Attention is split over A = T / (W / P) attention-TP ranks by head, and over the W ranks of a DCP group
by sequence; a rank ends with its piece of the group's output, which is the input of its rows of `o`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kvspan.attention.exchange import Piece, make_exchange
from kvspan.attention.kv_store import KvStore
from kvspan.comm.local import solo
from kvspan.config.model import ModelConfig
from kvspan.layers.embedding import VocabEmbedding
from kvspan.layers.linear import ColumnLinear, RowLinear, gather_columns
from kvspan.layers.norm import RMSNorm
from kvspan.layers.parameter import Target, linear_targets, sliced, whole
from kvspan.layers.rotary import Rotary, Rotation
from kvspan.layers.rows import row_ops
from kvspan.models.base import Batch, RankContext
from kvspan.topology import Span, cut


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


class DenseDecoder(nn.Module):
    """A dense decoder, or what one rank keeps of it.

    Args:
        config: sizes and settings.
        traits: what sets this architecture apart.
        context: ranks, groups, kernel and dtypes.
    """

    def __init__(self, config: ModelConfig, traits: DenseTraits, context: RankContext) -> None:
        super().__init__()
        self.config = config
        vocab = (config.vocab_size, config.hidden_size)
        self.embed = VocabEmbedding(*vocab, group=context.tp, storage=context.storage)
        self.layers = nn.ModuleList(
            DenseLayer(config, traits, context) for _ in range(config.num_layers)
        )
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, storage=context.storage)
        self.head = (
            self.embed
            if config.tie_word_embeddings
            else VocabEmbedding(*vocab, group=context.tp, storage=context.storage)
        )
        self._rotary = Rotary(config.rope, head_dim=config.head_dim, device=context.storage.device)

    def forward(self, batch: Batch) -> Tensor:
        """[R, hidden_size]: the final hidden states of a step's rows."""
        rotation = self._rotary.at(batch.positions)
        hidden: Tensor = self.embed(batch.token_ids)
        for layer in self.layers:
            hidden = layer(hidden, rotation, batch)
        normed: Tensor = self.norm(hidden)
        return normed

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, hidden_size] -> [n, vocab_size] float32, whole on every rank."""
        return self.head.logits(hidden)

    def kv_stores(self) -> list[KvStore]:
        """The cache of each layer."""
        return [layer.attention.store for layer in self._dense_layers()]

    def parameters_by_name(self) -> dict[str, Tensor]:
        """Every parameter by its dotted name; a tied output appears once, as the embedding."""
        return dict(self.named_parameters())

    def weight_targets(self) -> dict[str, Target]:
        """Checkpoint name -> where it goes on this rank."""
        c = self.config
        vocab = (c.vocab_size, c.hidden_size)
        targets = {
            "model.embed_tokens.weight": sliced("embed.weight", vocab, dim=0, part=self.embed.part),
            "model.norm.weight": whole("norm.weight", (c.hidden_size,)),
        }
        if not c.tie_word_embeddings:
            targets["lm_head.weight"] = sliced("head.weight", vocab, dim=0, part=self.head.part)
        for i, layer in enumerate(self._dense_layers()):
            targets |= layer.weight_targets(f"model.layers.{i}.", f"layers.{i}.")
        return targets

    def ignored_weights(self) -> frozenset[str]:
        """The output of a tied model, and frequencies that are computed here."""
        frequencies = {
            f"model.layers.{i}.self_attn.rotary_emb.inv_freq" for i in range(self.config.num_layers)
        }
        tied = {"lm_head.weight"} if self.config.tie_word_embeddings else set()
        return frozenset(frequencies | tied | {"rope_freqs.weight"})

    def _dense_layers(self) -> list["DenseLayer"]:
        return [layer for layer in self.layers if isinstance(layer, DenseLayer)]


class DenseLayer(nn.Module):
    """Attention and MLP, each on a normed input and added to the residual stream."""

    def __init__(self, config: ModelConfig, traits: DenseTraits, context: RankContext) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.attention_norm = RMSNorm(size, eps=eps, storage=context.storage)
        self.attention = DenseAttention(config, traits, context)
        self.mlp_norm = RMSNorm(size, eps=eps, storage=context.storage)
        self.mlp = DenseMLP(config, traits, context)

    def forward(self, hidden: Tensor, rotation: Rotation, batch: Batch) -> Tensor:
        """[R, hidden_size] -> [R, hidden_size]."""
        hidden = hidden + self.attention(self.attention_norm(hidden), rotation, batch)
        result: Tensor = hidden + self.mlp(self.mlp_norm(hidden))
        return result

    def weight_targets(self, theirs: str, ours: str) -> dict[str, Target]:
        """Targets of one layer, under the checkpoint's and our prefix."""
        size = self.attention_norm.weight.shape
        return {
            f"{theirs}input_layernorm.weight": whole(f"{ours}attention_norm.weight", size),
            f"{theirs}post_attention_layernorm.weight": whole(f"{ours}mlp_norm.weight", size),
            **self.attention.weight_targets(f"{theirs}self_attn.", f"{ours}attention."),
            **self.mlp.weight_targets(f"{theirs}mlp.", f"{ours}mlp."),
        }


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
        self.query_group = solo() if context.replicate_q else context.dcp
        self.query_parts = _cuts(width, self.query_group.size)
        rows = self.query_parts[self.query_group.rank].size + 2 * self.kv_heads.size * dim
        self.qkv = ColumnLinear(config.hidden_size, rows, bias=traits.qkv_bias, storage=storage)
        if traits.qk_norm:
            self.q_norm = RMSNorm(dim, eps=config.rms_norm_eps, storage=storage)
            self.k_norm = RMSNorm(dim, eps=config.rms_norm_eps, storage=storage)

        self.kernel = context.kernel
        self.scale = dim**-0.5
        self.store = KvStore(
            num_kv_heads=self.kv_heads.size,
            head_dim=dim,
            block_size=context.block_size,
            dtype=context.kv_dtype,
            device=context.storage.device,
        )
        self.exchange = make_exchange(context.exchange, context.dcp)
        self.pieces = [Piece(slice(None), columns) for columns in _cuts(width, context.dcp.size)]
        self.piece = self.pieces[context.dcp.rank].columns
        self.out = RowLinear(
            self.piece.size, config.hidden_size, bias=traits.o_bias, group=context.tp, storage=storage
        )

    def forward(self, x: Tensor, rotation: Rotation, batch: Batch) -> Tensor:
        """[R, hidden_size] -> [R, hidden_size]."""
        query, key, value = self._project(x)
        if self.traits.qk_norm:
            query, key = self.q_norm(query), self.k_norm(key)
        query, key = rotation.apply(query), rotation.apply(key)
        self.store.write(key, value, batch.writes)
        partial, lse = self.kernel(
            query.to(self.store.keys.dtype), self.store.keys, self.store.values, batch.keys, self.scale
        )
        piece = self.exchange.start(partial, lse, self.pieces).wait()
        out: Tensor = self.out(piece.to(x.dtype))
        return out

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[R, H / A, D] queries of the group, and [R, Hkv / A, D] keys and values of the rank."""
        kv_width = self.kv_heads.size * self.config.head_dim
        query_width = self.query_parts[self.query_group.rank].size
        query, key, value = torch.split(self.qkv(x), [query_width, kv_width, kv_width], dim=-1)
        query = gather_columns(query, self.query_group, self.query_parts)
        dims = (len(x), -1, self.config.head_dim)
        return query.reshape(dims), key.reshape(dims), value.reshape(dims)

    def weight_targets(self, theirs: str, ours: str) -> dict[str, Target]:
        """Targets of the projections: fused q, k, v here, three tensors in the checkpoint."""
        size, dim, bias = self.config.hidden_size, self.config.head_dim, self.traits.qkv_bias
        first = self.query_heads.start * dim  # where the group's queries begin in the checkpoint
        query = _shifted(self.query_parts[self.query_group.rank], first)
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
            part=_shifted(self.piece, first),
            bias=self.traits.o_bias,
        )
        if self.traits.qk_norm:
            for name in ("q_norm", "k_norm"):
                targets[f"{theirs}{name}.weight"] = whole(f"{ours}{name}.weight", (dim,))
        return targets


class DenseMLP(nn.Module):
    """SiLU-gated MLP, its inner dim shared over TP ranks."""

    def __init__(self, config: ModelConfig, traits: DenseTraits, context: RankContext) -> None:
        super().__init__()
        self.config, self.traits = config, traits
        self.part = cut(config.intermediate_size, parts=context.tp.size, index=context.tp.rank)
        size, inner = config.hidden_size, self.part.size
        self.gate_up = ColumnLinear(size, 2 * inner, bias=traits.mlp_bias, storage=context.storage)
        self.down = RowLinear(
            inner, size, bias=traits.mlp_bias, group=context.tp, storage=context.storage
        )

    def forward(self, x: Tensor) -> Tensor:
        """[R, hidden_size] -> [R, hidden_size]."""
        gate_up: Tensor = self.gate_up(x)
        result: Tensor = self.down(row_ops(gate_up).silu_mul(gate_up))
        return result

    def weight_targets(self, theirs: str, ours: str) -> dict[str, Target]:
        """Targets: fused gate and up here, two tensors in the checkpoint."""
        size, inner = self.config.hidden_size, self.config.intermediate_size
        bias, part = self.traits.mlp_bias, self.part
        return {
            **linear_targets(
                f"{theirs}gate_proj", f"{ours}gate_up", (inner, size), dim=0, part=part, bias=bias
            ),
            **linear_targets(
                f"{theirs}up_proj",
                f"{ours}gate_up",
                (inner, size),
                dim=0,
                part=part,
                at=part.size,
                bias=bias,
            ),
            **linear_targets(
                f"{theirs}down_proj", f"{ours}down", (size, inner), dim=1, part=part, bias=bias
            ),
        }


def _cuts(size: int, parts: int) -> list[Span]:
    return [cut(size, parts=parts, index=i) for i in range(parts)]


def _shifted(span: Span, by: int) -> Span:
    return Span(span.start + by, span.stop + by)
