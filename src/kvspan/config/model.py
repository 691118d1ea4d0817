"""What a model's config says, in one form whatever spelling it came in. Knows no tensors.

The source is a Hugging Face `config.json` (a mapping); a GGUF's metadata is translated to that form by
`loading.gguf`. Only keys that are needed are required: a file of bare facts will do.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from kvspan.errors import ModelError
from kvspan.topology import Heads


class RopeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How rotary frequencies are made.

    Args:
        kind: `default`, `linear`, `llama3` or `divisors`.
        theta: base of the frequencies.
        factor: linear, llama3: the context was stretched by this much.
        low_freq_factor: llama3: wavelengths over original / this are stretched in full.
        high_freq_factor: llama3: wavelengths under original / this are left alone.
        original_max_positions: llama3: context before stretching.
        divisors: one divisor for each of the head_dim / 2 frequencies, as GGUF files carry them.
    """

    kind: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192
    divisors: tuple[float, ...] = ()


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes and settings of a dense decoder.

    Args:
        architecture: the Hugging Face class name, e.g. `LlamaForCausalLM`.
        num_layers: decoder layers.
        hidden_size: width of the residual stream.
        num_heads: query heads.
        num_kv_heads: KV heads as stored.
        head_dim: elements of a head.
        intermediate_size: width of the MLP.
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

    @property
    def heads(self) -> Heads:
        """Heads, as topology counts them."""
        return Heads(self.num_heads, self.num_kv_heads)


def parse_model_config(raw: Mapping[str, Any], *, where: str) -> ModelConfig:
    """Reads a Hugging Face config.

    Args:
        raw: the mapping of `config.json`.
        where: file to name in errors.

    Raises:
        ModelError: a key is missing, of the wrong type, or says something kvspan does not know.
    """
    read = _Reader(raw, where)
    architectures = read.get("architectures", list, default=[])
    if len(architectures) != 1:
        raise ModelError(f'{where}: "architectures" must name one class, got {architectures!r}.')
    activation = read.get("hidden_act", str, default="silu")
    if activation not in ("silu", "swish"):
        raise ModelError(f'{where}: unknown hidden_act "{activation}" (has silu).')
    if read.get("use_sliding_window", bool, default=False):
        raise ModelError(f"{where}: sliding-window attention (use_sliding_window) is not there yet.")
    num_heads = read.positive("num_attention_heads")
    hidden_size = read.positive("hidden_size")
    num_kv_heads = read.positive("num_key_value_heads", default=num_heads)
    if num_heads % num_kv_heads:
        raise ModelError(f"{where}: {num_kv_heads} KV heads do not divide {num_heads} attention heads.")
    head_dim = read.positive("head_dim", default=max(hidden_size // num_heads, 1))
    if head_dim % 2:
        raise ModelError(f"{where}: head_dim {head_dim} is odd; rotary embedding needs pairs.")
    max_positions = read.positive("max_position_embeddings", default=2048)
    return ModelConfig(
        architecture=architectures[0],
        num_layers=read.positive("num_hidden_layers"),
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=read.positive("intermediate_size"),
        vocab_size=read.positive("vocab_size"),
        max_position_embeddings=max_positions,
        rms_norm_eps=float(read.get("rms_norm_eps", (int, float), default=1e-6)),
        rope=_parse_rope(read, max_positions),
        tie_word_embeddings=read.get("tie_word_embeddings", bool, default=False),
        attention_bias=read.get("attention_bias", bool, default=False),
        mlp_bias=read.get("mlp_bias", bool, default=False),
        bos_token_id=read.get("bos_token_id", (int, type(None)), default=None),
        eos_token_ids=token_ids(read.get("eos_token_id", (int, list, type(None)), default=None)),
        dtype=read.get("dtype", str, default=None) or read.get("torch_dtype", str, default="bfloat16"),
    )


def token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    """One id, several or none, as configs write them, as a tuple."""
    return () if value is None else (value,) if isinstance(value, int) else tuple(value)


def _parse_rope(read: "_Reader", max_positions: int) -> RopeConfig:
    """Reads the three spellings: `rope_parameters`, and `rope_scaling` with `rope_type` or `type`."""
    settings = dict(read.get("rope_scaling", (dict, type(None)), default=None) or {})
    settings |= read.get("rope_parameters", (dict, type(None)), default=None) or {}
    theta = settings.pop("rope_theta", None) or read.get("rope_theta", (int, float), default=10000.0)
    rope = _Reader(settings, f"{read.where} (rope settings)")
    kind = rope.get("rope_type", str, default=None) or rope.get("type", str, default="default")
    if kind == "default":
        return RopeConfig(theta=float(theta))
    if kind == "divisors":
        divisors = tuple(float(d) for d in rope.required("divisors", list))
        return RopeConfig(kind=kind, theta=float(theta), divisors=divisors)
    if kind not in ("linear", "llama3"):
        raise ModelError(f'{read.where}: unknown rope type "{kind}" (has default, linear, llama3).')
    factor = float(rope.required("factor", (int, float)))
    if kind == "linear":
        return RopeConfig(kind=kind, theta=float(theta), factor=factor)
    return RopeConfig(
        kind=kind,
        theta=float(theta),
        factor=factor,
        low_freq_factor=float(rope.required("low_freq_factor", (int, float))),
        high_freq_factor=float(rope.required("high_freq_factor", (int, float))),
        original_max_positions=rope.positive("original_max_position_embeddings", default=max_positions),
    )


class _Reader:
    """Reads keys of a mapping and names the file and the key when one is not as it must be."""

    def __init__(self, raw: Mapping[str, Any], where: str) -> None:
        self.raw = raw
        self.where = where

    def get(self, key: str, kinds: type | tuple[type, ...], *, default: Any) -> Any:
        """The value at `key`, or `default` when there is none."""
        value = self.raw.get(key)
        return default if value is None else self._checked(key, value, kinds)

    def required(self, key: str, kinds: type | tuple[type, ...]) -> Any:
        """The value at `key`; a missing one is an error."""
        if self.raw.get(key) is None:
            raise ModelError(f'{self.where}: the key "{key}" is missing.')
        return self._checked(key, self.raw[key], kinds)

    def positive(self, key: str, *, default: int | None = None) -> int:
        """A whole number of at least 1."""
        value: int = self.required(key, int) if default is None else self.get(key, int, default=default)
        if value < 1:
            raise ModelError(f'{self.where}: "{key}" is {value}; it must be at least 1.')
        return value

    def _checked(self, key: str, value: Any, kinds: type | tuple[type, ...]) -> Any:
        wrong_bool = isinstance(value, bool) and kinds is not bool
        if wrong_bool or not isinstance(value, kinds):
            raise ModelError(f'{self.where}: "{key}" has the unexpected value {value!r}.')
        return value
