"""Weights that a rank keeps, as matrices: what they weigh, and what a row of a step multiplies.

The same cuts as the models make (`models/dense.py`, `models/deepseek.py`, `layers/moe.py`), in numbers.
Norms and biases are left out: they are under a thousandth. Knows no tensors and no times.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvspan.config.mla import MlaConfig
from kvspan.config.model import ModelConfig
from kvspan.config.moe import MoeConfig
from kvspan.errors import ConfigError, ModelError
from kvspan.topology import Topology, cut, touched_heads

WEIGHT_BITS = {"bf16": 16.0, "fp32": 32.0, "fp8": 8.0, "int4": 4.5, "nvfp4": 4.5}
"""Bits of a weight with its scales: int4 has one of bf16 for 32 inputs, nvfp4 one of fp8 for 16."""

MULTIPLIED_IN = {"bf16": ("bf16",), "fp32": ("bf16",), "fp8": ("fp8", "bf16"), "int4": ("bf16",)} | {
    "nvfp4": ("fp4", "fp8", "bf16")
}
"""What multiplies weights of a dtype, best first; a device takes the first that it has."""


@dataclass(frozen=True, slots=True)
class Matrix:
    """A matrix, or what one rank keeps of it.

    Args:
        params: elements; a row multiplies each of them once.
        dtype: a key of `WEIGHT_BITS`.
    """

    params: int
    dtype: str

    @property
    def num_bytes(self) -> float:
        """As it is stored."""
        return self.params * WEIGHT_BITS[self.dtype] / 8


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightDtypes:
    """How the weights of a model are stored.

    Args:
        linear: of layers' matrices.
        experts: of routed experts.
        ends: of the embedding and the output layer.
    """

    linear: str = "bf16"
    experts: str = "bf16"
    ends: str = "bf16"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankWeights:
    """What the rank that keeps most keeps.

    Args:
        attention: matrices of one layer's attention, each for rows whose queries go to the keys.
        staying: of each of them, what a row multiplies that stays with its heads.
        absorb: of latent attention, what makes keys and values of latents; nothing else has it.
        dense: matrices of the MLP of a layer without experts.
        shared: matrices of a layer's shared experts, and the router.
        expert: the rank's part of one routed expert.
        num_experts: routed experts of which it keeps that part.
        embedding: looked up, not multiplied.
        head: of the output layer; the embedding itself where they are tied.
        num_dense_layers: layers with `dense`.
        num_expert_layers: layers with `shared` and experts.
        tied: whether the head is the embedding.
    """

    attention: tuple[Matrix, ...]
    staying: tuple[Matrix, ...]
    absorb: tuple[Matrix, ...]
    dense: tuple[Matrix, ...]
    shared: tuple[Matrix, ...]
    expert: tuple[Matrix, ...]
    num_experts: int
    embedding: Matrix
    head: Matrix
    num_dense_layers: int
    num_expert_layers: int
    tied: bool

    @property
    def num_bytes(self) -> int:
        """In all."""
        per_layer = _bytes(self.attention) + _bytes(self.absorb)
        experts = _bytes(self.shared) + self.num_experts * _bytes(self.expert)
        ends = self.head.num_bytes + (0 if self.tied else self.embedding.num_bytes)
        return int(
            (self.num_dense_layers + self.num_expert_layers) * per_layer
            + self.num_dense_layers * _bytes(self.dense)
            + self.num_expert_layers * experts
            + ends
        )


def weight_dtypes(asked: str, raw_config: Mapping[str, Any], model: ModelConfig) -> WeightDtypes:
    """How weights are stored, as asked or as the checkpoint's config says.

    Weights of 4 bits are those of routed experts where there are any, as in the published checkpoints of
    such models, and all matrices of layers elsewhere; embedding and output layer stay as they are.

    Args:
        asked: `auto` or a key of `WEIGHT_BITS`.
        raw_config: of the text model.
        model: the same, read.

    Raises:
        ConfigError: there is no such dtype.
        ModelError: the checkpoint's is not known.
    """
    if asked != "auto" and asked not in WEIGHT_BITS:
        raise ConfigError(f"--weights-dtype {asked} is not one of auto, {', '.join(WEIGHT_BITS)}.")
    kind = _checkpoint_dtype(raw_config, model) if asked == "auto" else asked
    if kind in ("bf16", "fp32"):
        return WeightDtypes(linear=kind, experts=kind, ends=kind)
    if kind == "fp8":
        return WeightDtypes(linear="fp8", experts="fp8")
    return WeightDtypes(linear="bf16" if model.moe is not None else kind, experts=kind)


def rank_weights(
    model: ModelConfig,
    topology: Topology,
    *,
    replicate_q: bool,
    dtypes: WeightDtypes,
    expert_parallel: bool = False,
    ranks_are_homes: bool = False,
) -> RankWeights:
    """What a rank keeps; pieces differ by a unit at the most, and the largest counts.

    Args:
        model: sizes.
        topology: a legal layout.
        replicate_q: whether each rank projects all queries of its DCP group.
        dtypes: how they are stored.
        expert_parallel: whether ranks keep whole experts.
        ranks_are_homes: whether each rank of a DCP group makes queries and outputs of its own requests.
    """
    t, hidden = topology.tp_size, model.hidden_size
    dims, parts = model.head_dims, topology.tp_ranks_per_dcp
    heads = topology.query_heads(0, model.heads).size
    query = _piece(heads * dims.query, 1 if replicate_q or ranks_are_homes else parts)
    own_query = min(_most_touched(heads, dims.out, parts=parts) * dims.query, query)
    out = _piece(heads * dims.out, 1 if ranks_are_homes else parts)
    own_out = _piece(heads * dims.out, parts)
    moe = model.moe
    num_expert_layers = len(moe.layers) if moe is not None else 0
    vocab = Matrix(_piece(model.vocab_size, t) * hidden, dtypes.ends)
    return RankWeights(
        attention=_attention(model, topology, query=query, out=out, dtype=dtypes.linear),
        staying=_attention(model, topology, query=own_query, out=own_out, dtype=dtypes.linear),
        absorb=_absorb(model, topology),
        dense=_mlp(hidden, _piece(model.intermediate_size, t), dtypes.linear),
        shared=_shared(moe, hidden, t, dtypes.linear),
        expert=_expert(moe, hidden, 1 if expert_parallel else t, dtypes.experts),
        num_experts=0 if moe is None else -(-moe.num_experts // (t if expert_parallel else 1)),
        embedding=vocab,
        head=vocab,
        num_dense_layers=model.num_layers - num_expert_layers,
        num_expert_layers=num_expert_layers,
        tied=model.tie_word_embeddings,
    )


def copies_at_home(model: ModelConfig, topology: Topology) -> int:
    """Elements that a rank keeps beyond its part because it is a home: of queries and of the output.

    Args:
        model: sizes.
        topology: a legal layout.
    """
    own, whole = (
        rank_weights(
            model, topology, replicate_q=False, dtypes=WeightDtypes(), ranks_are_homes=ranks_are_homes
        )
        for ranks_are_homes in (False, True)
    )
    return model.num_layers * (_params(whole.attention) - _params(own.attention))


def active_params(model: ModelConfig) -> int:
    """Elements that one row multiplies on its way through the whole model, one copy of everything."""
    whole = rank_weights(model, Topology(), replicate_q=False, dtypes=WeightDtypes())
    moe = model.moe
    per_row = moe.experts_per_token * _params(whole.expert) if moe is not None else 0
    layers = model.num_layers * (_params(whole.attention) + _params(whole.absorb))
    dense = whole.num_dense_layers * _params(whole.dense)
    experts = whole.num_expert_layers * (_params(whole.shared) + per_row)
    return layers + dense + experts + whole.head.params


def _attention(
    model: ModelConfig, topology: Topology, *, query: int, out: int, dtype: str
) -> tuple[Matrix, ...]:
    """A layer's projections.

    Args:
        model: sizes.
        topology: a legal layout.
        query: columns of queries.
        out: inputs of the output.
        dtype: how they are stored.
    """
    hidden = model.hidden_size
    outwards = Matrix(out * hidden, dtype)
    if model.mla is None:
        kv = topology.kv_heads(0, model.heads).size * model.head_dims.cached
        return Matrix((query + kv) * hidden, dtype), outwards
    mla = model.mla
    down = Matrix((mla.kv_lora_rank + mla.rope_dim) * hidden, dtype)
    if mla.q_lora_rank is None:
        return Matrix(query * hidden, dtype), down, outwards
    through = (Matrix(mla.q_lora_rank * hidden, dtype), Matrix(query * mla.q_lora_rank, dtype))
    return *through, down, outwards


def _absorb(model: ModelConfig, topology: Topology) -> tuple[Matrix, ...]:
    """Of latent attention what makes keys and values."""
    mla = model.mla
    if mla is None:
        return ()
    heads = topology.query_heads(0, model.heads).size
    return (Matrix(heads * (mla.nope_dim + mla.value_dim) * mla.kv_lora_rank, "bf16"),)


def asking_params(mla: MlaConfig, *, num_heads: int) -> int:
    """Elements that a row multiplies to ask latents, for all heads of its group.

    Args:
        mla: sizes.
        num_heads: H / A.
    """
    return num_heads * mla.nope_dim * mla.kv_lora_rank


def answered_params(mla: MlaConfig, topology: Topology, *, num_heads: int) -> int:
    """Elements that a row multiplies to make values of what latents answer.

    Args:
        mla: sizes.
        topology: a legal layout.
        num_heads: H / A, of which each rank makes values of those that its slice touches.
    """
    parts = topology.tp_ranks_per_dcp
    heads = _most_touched(num_heads, mla.value_dim, parts=parts)
    return heads * mla.value_dim * mla.kv_lora_rank


def _most_touched(num_heads: int, out_dim: int, *, parts: int) -> int:
    """Heads that a rank's slice of the output touches, at the most."""
    slices = (cut(num_heads * out_dim, parts=parts, index=i) for i in range(parts))
    return max(touched_heads(its, out_dim).size for its in slices)


def _mlp(hidden: int, inner: int, dtype: str) -> tuple[Matrix, ...]:
    return (Matrix(2 * inner * hidden, dtype), Matrix(inner * hidden, dtype)) if inner else ()


def _shared(moe: MoeConfig | None, hidden: int, tp_size: int, dtype: str) -> tuple[Matrix, ...]:
    if moe is None:
        return ()
    router = Matrix(moe.num_experts * hidden, "bf16")
    return (router, *_mlp(hidden, _piece(moe.shared_intermediate_size, tp_size), dtype))


def _expert(moe: MoeConfig | None, hidden: int, parts: int, dtype: str) -> tuple[Matrix, ...]:
    return () if moe is None else _mlp(hidden, _piece(moe.intermediate_size, parts), dtype)


def _piece(size: int, parts: int) -> int:
    """The largest of the pieces that `topology.cut` makes."""
    return max(cut(size, parts=parts, index=i).size for i in range(parts))


def _bytes(matrices: tuple[Matrix, ...]) -> float:
    return sum(m.num_bytes for m in matrices)


def _params(matrices: tuple[Matrix, ...]) -> int:
    return sum(m.params for m in matrices)


def _checkpoint_dtype(raw_config: Mapping[str, Any], model: ModelConfig) -> str:
    """The dtype that a config says its weights have."""
    quantised = raw_config.get("quantization_config")
    if not isinstance(quantised, Mapping):
        return "fp32" if model.dtype == "float32" else "bf16"
    method, bits = str(quantised.get("quant_method")), quantised.get("bits")
    if method == "fp8":
        return "fp8"
    if method in ("compressed-tensors", "awq", "gptq") and (bits in (None, 4)):
        return "int4"
    raise ModelError(
        f'The config\'s quant_method "{method}" with bits {bits} is not known: say what its weights are '
        f"with --weights-dtype ({', '.join(WEIGHT_BITS)})."
    )
