"""A decoder as a stack of layers, whatever their attention and their MLPs are.

    tokens ─ embedding ─ layers: x + attention(norm(x)), x + feed_forward(norm(x)) ─ norm ─ logits

What sets models apart is handed in: how a layer's attention and its feed-forward part are made.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor, nn

from kvspan.attention.kv_store import CacheStore
from kvspan.config.model import ModelConfig
from kvspan.layers.embedding import VocabEmbedding
from kvspan.layers.experts import Experts
from kvspan.layers.linear import Matrix, PlainMatrix, pack
from kvspan.layers.logits import Logits
from kvspan.layers.mlp import GatedMLP
from kvspan.layers.moe import MoE
from kvspan.layers.norm import RMSNorm
from kvspan.layers.parameter import Target, sliced, whole
from kvspan.layers.rotary import Rotary, Rotation
from kvspan.layers.routing import Router
from kvspan.layers.team import Team
from kvspan.models.base import Batch, RankContext

_PREDICTION_JOINTS = (
    "embed_tokens",
    "enorm",
    "hnorm",
    "eh_proj",
    "shared_head.norm",
    "shared_head.head",
)
"""What a multi-token prediction layer has beside the tensors of an ordinary one."""


class Attention(Protocol):
    """The attention of one layer, over a cache that is spread over the DCP group."""

    @property
    def store(self) -> CacheStore:
        """This rank's part of the cache."""
        ...

    def __call__(self, x: Tensor, rotation: Rotation, batch: Batch, /) -> Tensor:
        """[R, hidden_size] -> [R, hidden_size]."""
        ...

    def weight_targets(self, theirs: str, ours: str) -> dict[str, Target]:
        """Targets under the checkpoint's and our prefix."""
        ...


class FeedForward(Protocol):
    """What a layer does to each row by itself."""

    def __call__(self, x: Tensor, team: Team, /) -> Tensor:
        """[R, hidden_size] -> [R, hidden_size]; the team is who multiplies the rows."""
        ...

    def weight_targets(self, theirs: str, ours: str) -> dict[str, Target]:
        """Targets under the checkpoint's and our prefix."""
        ...


def feed_forward(
    config: ModelConfig, layer: int, context: RankContext, *, bias: bool = False
) -> FeedForward:
    """The feed-forward part of a layer: experts where the config has them, or one MLP.

    Args:
        config: sizes and settings.
        layer: number of the layer.
        context: ranks, groups, kernel and dtypes.
        bias: whether the MLP has biases.
    """
    size, group, storage = config.hidden_size, context.tp, context.storage
    if config.moe is not None and layer in config.moe.layers:
        parallel = context.expert_parallel
        return MoE(config.moe, size, expert_parallel=parallel, group=group, storage=storage)
    return GatedMLP(size, config.intermediate_size, bias=bias, group=group, storage=storage)


class Decoder(nn.Module):
    """A decoder, or what one rank keeps of it.

    Args:
        config: sizes and settings.
        context: ranks, groups, kernel and dtypes.
        attention: makes the attention of a layer.
        feed_forward: makes the feed-forward part of the layer of a number.
    """

    def __init__(
        self,
        config: ModelConfig,
        context: RankContext,
        *,
        attention: Callable[[], Attention],
        feed_forward: Callable[[int], FeedForward],
    ) -> None:
        super().__init__()
        self.config, self._coordinates = config, context.row_groups.pcp
        self.embed = _embedding(config, context)
        self.layers = nn.ModuleList(
            DecoderLayer(config, context, attention(), feed_forward(i)) for i in range(config.num_layers)
        )
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, storage=context.storage)
        self.head = self.embed if config.tie_word_embeddings else _embedding(config, context)
        rotated = config.head_dims.rotary
        self._rotary = Rotary(config.rope, head_dim=rotated, device=context.storage.device)

    def rotation(self, positions: Tensor) -> Rotation:
        """See `Model.rotation`."""
        return self._rotary.at(positions)

    def forward(self, batch: Batch, rotation: Rotation) -> Tensor:
        """See `Model.forward`."""
        hidden: Tensor = self.embed(batch.token_ids)
        team = Team(self._coordinates, batch.team)
        layers = self._decoder_layers()
        next_norms = [*(layer.attention_norm for layer in layers[1:]), self.norm]
        normed: Tensor = layers[0].attention_norm(hidden)
        for layer, next_norm in zip(layers, next_norms, strict=True):
            # A layer's sum and the norm after it are one pass over the residual stream, `hidden`.
            normed = layer.mlp_norm.of_sum(hidden, layer.attention(normed, rotation, batch))
            normed = next_norm.of_sum(hidden, layer.mlp(normed, team))
        return normed

    def logits(self, hidden: Tensor, team: Sequence[int] = ()) -> Logits:
        """See `Model.logits`."""
        return self.head.logits(hidden, Team(self._coordinates, team))

    def settle(self) -> None:
        """See `Model.settle`."""
        packable = Matrix | PlainMatrix | Experts | Router
        pack([module for module in self.modules() if isinstance(module, packable)])

    def kv_stores(self) -> list[CacheStore]:
        """The cache of each layer."""
        return [layer.attention.store for layer in self._decoder_layers()]

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
        for i, layer in enumerate(self._decoder_layers()):
            targets |= layer.weight_targets(f"model.layers.{i}.", f"layers.{i}.")
        return {f"{c.tensor_prefix}{name}": target for name, target in targets.items()}

    def ignored_weights(self) -> frozenset[str]:
        """The output of a tied model, frequencies that are computed here, layers that guess ahead."""
        frequencies = {
            f"model.layers.{i}.self_attn.rotary_emb.inv_freq" for i in range(self.config.num_layers)
        }
        tied = {"lm_head.weight"} if self.config.tie_word_embeddings else set()
        names = frequencies | tied | {"rope_freqs.weight"} | self._prediction_weights()
        return frozenset(f"{self.config.tensor_prefix}{name}" for name in names)

    def _prediction_weights(self) -> set[str]:
        """Names of multi-token prediction layers: as the last layer, with what joins them to it."""
        first = self.config.num_layers
        names: set[str] = set()
        for i in range(first, first + self.config.num_prediction_layers):
            prefix = f"model.layers.{i}."
            names |= self._decoder_layers()[-1].weight_targets(prefix, "").keys()
            names |= {f"{prefix}{name}.weight" for name in _PREDICTION_JOINTS}
        return names

    def _decoder_layers(self) -> list["DecoderLayer"]:
        return [layer for layer in self.layers if isinstance(layer, DecoderLayer)]


def _embedding(config: ModelConfig, context: RankContext) -> VocabEmbedding:
    return VocabEmbedding(
        config.vocab_size,
        config.hidden_size,
        group=context.tp,
        everyone=context.row_groups.vocabulary,
        storage=context.storage,
    )


class DecoderLayer(nn.Module):
    """Attention and a feed-forward part, each on a normed input and added to the residual stream."""

    attention: Attention
    mlp: FeedForward

    def __init__(
        self, config: ModelConfig, context: RankContext, attention: Attention, mlp: FeedForward
    ) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.attention_norm = RMSNorm(size, eps=eps, storage=context.storage)
        self.attention = attention
        self.mlp_norm = RMSNorm(size, eps=eps, storage=context.storage)
        self.mlp = mlp

    def weight_targets(self, theirs: str, ours: str) -> dict[str, Target]:
        """Targets of one layer, under the checkpoint's and our prefix."""
        size = self.attention_norm.weight.shape
        return {
            f"{theirs}input_layernorm.weight": whole(f"{ours}attention_norm.weight", size),
            f"{theirs}post_attention_layernorm.weight": whole(f"{ours}mlp_norm.weight", size),
            **self.attention.weight_targets(f"{theirs}self_attn.", f"{ours}attention."),
            **self.mlp.weight_targets(f"{theirs}mlp.", f"{ours}mlp."),
        }
