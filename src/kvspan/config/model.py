"""What a model's config says, in one form whatever spelling it came in. Knows no tensors.

The source is a Hugging Face `config.json` (a mapping); a GGUF's metadata is translated to that form by
`loading.gguf`. Only keys that are needed are required: a file of bare facts will do.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from kvspan.config.mla import MlaConfig, parse_mla
from kvspan.config.moe import MoeConfig, parse_moe
from kvspan.config.reader import Reader
from kvspan.config.rope import RopeConfig, parse_rope
from kvspan.errors import ConfigError, ModelError
from kvspan.topology import Heads

NESTED = {"kimi_k25": ("language_model.", "DeepseekV3ForCausalLM")}
"""model_type of configs that keep a text model under `text_config` -> prefix of its tensors' names, and
its architecture if it does not say."""

_SHARED_KEYS = ("bos_token_id", "eos_token_id", "dtype", "torch_dtype", "quantization_config")
"""Keys that a nested config may have beside its text model, and that hold for it too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadDims:
    """Elements of a head at each station of attention.

    Args:
        query: of a query as it is projected.
        rotary: of a query or key that are rotated.
        key: of a key as it is cached.
        value: of a value as it is cached, and so of partial results.
        cached: stored for a token and KV head; a value that is a part of its key takes no room.
        scales: stored beside them if they have 8 bits: of key and value, or of latent and rotated part.
        out: of what the output projection takes.
    """

    query: int
    rotary: int
    key: int
    value: int
    cached: int
    out: int
    scales: int = 2

    @property
    def of_kernels(self) -> tuple[tuple[int, int], ...]:
        """(key, value) that kernels are asked with: as they are cached, and as they are made of that."""
        return (self.key, self.value), (self.query, self.out)


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes and settings of a decoder.

    Args:
        architecture: the Hugging Face class name, e.g. `LlamaForCausalLM`.
        num_layers: decoder layers.
        hidden_size: width of the residual stream.
        num_heads: query heads.
        num_kv_heads: KV heads as stored: 1 with latent attention.
        head_dim: elements of a head's query.
        intermediate_size: width of the MLP; 0 if every layer has experts.
        vocab_size: rows of the embedding.
        max_position_embeddings: positions that the model was made for.
        rms_norm_eps: epsilon of every RMSNorm.
        rope: rotary settings.
        tie_word_embeddings: whether the output layer is the embedding.
        attention_bias: bias on q, k and v (and on o as well where the architecture has it so).
        mlp_bias: bias on the MLP's linear layers.
        bos_token_id: first token of a text, if the config names one.
        eos_token_ids: tokens that end a text.
        dtype: dtype of the checkpoint, e.g. `bfloat16`.
        mla: latent attention; None = keys and values of each KV head are cached.
        moe: experts; None = each layer has one MLP.
        num_prediction_layers: layers after the others that guess further tokens; kvspan does without.
        tensor_prefix: what the names of all tensors of the text model begin with.
    """

    architecture: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    dtype: str
    mla: MlaConfig | None = None
    moe: MoeConfig | None = None
    num_prediction_layers: int = 0
    tensor_prefix: str = ""

    @property
    def heads(self) -> Heads:
        """Heads, as topology counts them."""
        return Heads(self.num_heads, self.num_kv_heads)

    @property
    def head_dims(self) -> HeadDims:
        """Elements of a head at each station of attention."""
        if self.mla is None:
            d = self.head_dim
            return HeadDims(query=d, rotary=d, key=d, value=d, cached=2 * d, out=d)
        m = self.mla
        key = m.kv_lora_rank + m.rope_dim
        return HeadDims(
            query=self.head_dim,
            rotary=m.rope_dim,
            key=key,
            value=m.kv_lora_rank,
            cached=key,
            out=m.value_dim,
        )

    @property
    def softmax_scale(self) -> float:
        """Factor on the scores."""
        plain = float(self.head_dim**-0.5)
        return plain if self.mla is None else plain * self.mla.score_factor


def parse_model_config(raw: Mapping[str, Any], *, where: str) -> ModelConfig:
    """Reads a Hugging Face config.

    Args:
        raw: the mapping of `config.json`.
        where: file to name in errors.

    Raises:
        ModelError: a key is missing, of the wrong type, or says something kvspan does not know.
    """
    read, prefix = _text_model(Reader(raw, where))
    architecture = _check_kind(read)
    num_layers = read.positive("num_hidden_layers")
    max_positions = read.positive("max_position_embeddings", default=2048)
    mla = parse_mla(read)
    moe = parse_moe(read, architecture=architecture, num_layers=num_layers)
    num_heads, num_kv_heads, head_dim = _parse_heads(read, mla)
    interleaved = mla is not None and read.get("rope_interleave", bool, default=True)
    all_experts = moe is not None and len(moe.layers) == num_layers
    return ModelConfig(
        architecture=architecture,
        num_layers=num_layers,
        hidden_size=read.positive("hidden_size"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=0 if all_experts else read.positive("intermediate_size"),
        vocab_size=read.positive("vocab_size"),
        max_position_embeddings=max_positions,
        rms_norm_eps=read.positive_number("rms_norm_eps", default=1e-6),
        rope=parse_rope(read, max_positions=max_positions, interleaved=interleaved),
        tie_word_embeddings=read.get("tie_word_embeddings", bool, default=False),
        attention_bias=read.get("attention_bias", bool, default=False),
        mlp_bias=read.get("mlp_bias", bool, default=False),
        bos_token_id=read.get("bos_token_id", int, default=None),
        eos_token_ids=token_ids(read.get("eos_token_id", (int, list), default=None)),
        dtype=read.get("dtype", str, default=None) or read.get("torch_dtype", str, default="bfloat16"),
        mla=mla,
        moe=moe,
        num_prediction_layers=read.get("num_nextn_predict_layers", int, default=0),
        tensor_prefix=prefix,
    )


def token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    """One id, several or none, as configs write them, as a tuple."""
    return () if value is None else (value,) if isinstance(value, int) else tuple(value)


def named_architectures(raw: Mapping[str, Any], *, where: str) -> list[Any]:
    """What a config calls its model, or the text model inside it if kvspan knows how it is nested.

    Args:
        raw: the mapping of `config.json`.
        where: file to name in errors.

    Raises:
        ModelError: it is no list.
    """
    read = Reader(raw, where)
    if read.get("model_type", str, default="") in NESTED:
        read, _ = _text_model(read)
    names: list[Any] = read.get("architectures", list, default=[])
    return names


def text_config(raw: Mapping[str, Any], *, where: str) -> Mapping[str, Any]:
    """The part of a config that is about text: all of it, unless it is nested.

    Args:
        raw: the mapping of `config.json`.
        where: file to name in errors.

    Raises:
        ModelError: it is nested in a way that kvspan does not know.
    """
    return _text_model(Reader(raw, where))[0].raw


def with_overrides(raw: Mapping[str, Any], overrides: Mapping[str, Any]) -> Mapping[str, Any]:
    """A config of which the user replaces some keys: those of the text model, if it is nested.

    Args:
        raw: the mapping of `config.json`.
        overrides: key -> value.

    Raises:
        ConfigError: one of them says how weights are stored, which is for their files to say.
    """
    if "quantization_config" in overrides:
        raise ConfigError(
            "--hf-overrides has quantization_config, which says how the checkpoint's weights are stored "
            "and cannot be changed when they are read: leave it out."
        )
    if isinstance(text := raw.get("text_config"), Mapping) and overrides:
        return {**raw, "text_config": {**text, **overrides}}
    return {**raw, **overrides}


def _text_model(read: Reader) -> tuple[Reader, str]:
    """The text model's config, and the prefix of its tensors' names."""
    if not read.has("text_config"):
        return read, ""
    kind = read.get("model_type", str, default="")
    if kind not in NESTED:
        raise ModelError(
            f'{read.where}: the text model of "{kind}" is nested in a way that kvspan does not know '
            f"(has {', '.join(NESTED)})."
        )
    prefix, architecture = NESTED[kind]
    shared = {key: read.raw[key] for key in _SHARED_KEYS if read.has(key)}
    text = {k: v for k, v in read.required("text_config", dict).items() if v is not None}
    whole = {"architectures": [architecture], **shared, **text}
    return Reader(whole, f"{read.where} (text_config)"), prefix


def _check_kind(read: Reader) -> str:
    """The architecture, of a model that works as kvspan's models do."""
    architectures = read.get("architectures", list, default=[])
    if len(architectures) != 1:
        raise ModelError(f'{read.where}: "architectures" must name one class, got {architectures!r}.')
    activation = read.get("hidden_act", str, default="silu")
    if activation not in ("silu", "swish"):
        raise ModelError(f'{read.where}: unknown hidden_act "{activation}" (has silu).')
    _refuse_unknown_mathematics(read)
    architecture: str = architectures[0]
    return architecture


def _parse_heads(read: Reader, mla: MlaConfig | None) -> tuple[int, int, int]:
    """Query heads, KV heads as stored, and elements of a head's query."""
    num_heads = read.positive("num_attention_heads")
    if mla is not None:  # its num_key_value_heads are those made from the latent, not stored ones
        num_kv_heads, head_dim, rotary = 1, mla.nope_dim + mla.rope_dim, mla.rope_dim
    else:
        num_kv_heads = read.positive("num_key_value_heads", default=num_heads)
        head_dim = read.positive("head_dim", default=max(read.positive("hidden_size") // num_heads, 1))
        rotary = head_dim
    if num_heads % num_kv_heads:
        raise ModelError(
            f"{read.where}: {num_kv_heads} KV heads do not divide {num_heads} attention heads."
        )
    if rotary % 2:
        name = "head_dim" if mla is None else "qk_rope_head_dim"
        raise ModelError(f"{read.where}: {name} {rotary} is odd; rotary embedding needs pairs.")
    return num_heads, num_kv_heads, head_dim


def _refuse_unknown_mathematics(read: Reader) -> None:
    """Refuses what would change the text if it were ignored."""
    kinds = set(read.get("layer_types", list, default=[])) - {"full_attention"}
    if read.get("use_sliding_window", bool, default=False) or kinds:
        raise ModelError(
            f"{read.where}: sliding-window and linear attention (use_sliding_window, layer_types) are "
            "not there yet."
        )
    for key, neutral in (
        ("partial_rotary_factor", 1.0),
        ("attn_logit_softcapping", 0.0),
        ("final_logit_softcapping", 0.0),
        ("logit_scale", 1.0),
    ):
        if (value := read.number(key, default=neutral)) != neutral:
            raise ModelError(f'{read.where}: "{key}" {value} is not there yet.')
