"""Rotary embedding as configs write it, in three spellings. Knows no tensors."""

import math

import msgspec

from kvspan.config.reader import Reader
from kvspan.errors import ModelError

ROPE_KINDS = ("default", "linear", "llama3", "yarn")
"""Kinds that a Hugging Face config may name; `divisors` comes from GGUF files alone."""


class RopeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How rotary frequencies are made.

    Args:
        kind: `default`, `linear`, `llama3`, `yarn` or `divisors`.
        theta: base of the frequencies.
        factor: linear, llama3, yarn: the context was stretched by this much.
        low_freq_factor: llama3: wavelengths over original / this are stretched in full.
        high_freq_factor: llama3: wavelengths under original / this are left alone.
        beta_fast: yarn: frequencies that turn so often in the original context are left alone.
        beta_slow: yarn: those that turn so often or less are stretched in full.
        truncate: yarn: whether the ramp between them begins and ends at whole frequencies.
        amplitude: yarn: factor on rotated queries and keys.
        original_max_positions: llama3, yarn: context before stretching.
        divisors: one divisor for each of the frequencies, as GGUF files carry them.
        interleaved: whether pairs are neighbours, (0, 1), (2, 3), ..., and not halves apart.
    """

    kind: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    amplitude: float = 1.0
    original_max_positions: int = 8192
    divisors: tuple[float, ...] = ()
    interleaved: bool = False


def parse_rope(read: Reader, *, max_positions: int, interleaved: bool) -> RopeConfig:
    """Reads the three spellings: `rope_parameters`, and `rope_scaling` with `rope_type` or `type`.

    Args:
        read: the model's config.
        max_positions: stands in for an original context that is not named.
        interleaved: how the model pairs dims.

    Raises:
        ModelError: a setting is missing or of a kind that kvspan does not know.
    """
    rope = rope_settings(read)
    theta = rope.positive_number(
        "rope_theta", default=read.positive_number("rope_theta", default=10000.0)
    )
    kind = rope.get("rope_type", str, default=None) or rope.get("type", str, default="default")
    plain = RopeConfig(kind=kind, theta=theta, interleaved=interleaved)
    if kind == "default":
        return plain
    if kind == "divisors":
        divisors = tuple(float(d) for d in rope.required("divisors", list))
        return msgspec.structs.replace(plain, divisors=divisors)
    if kind not in ROPE_KINDS:
        raise ModelError(f'{read.where}: unknown rope type "{kind}" (has {", ".join(ROPE_KINDS)}).')
    stretched = msgspec.structs.replace(plain, factor=rope.positive_number("factor"))
    if kind == "linear":
        return stretched
    original = rope.positive("original_max_position_embeddings", default=max_positions)
    stretched = msgspec.structs.replace(stretched, original_max_positions=original)
    if kind == "llama3":
        low, high = (rope.positive_number(f"{end}_freq_factor") for end in ("low", "high"))
        if low >= high:
            raise ModelError(
                f"{rope.where}: low_freq_factor {low} must be less than high_freq_factor {high}."
            )
        return msgspec.structs.replace(stretched, low_freq_factor=low, high_freq_factor=high)
    return msgspec.structs.replace(
        stretched,
        beta_fast=rope.number("beta_fast", default=32.0),
        beta_slow=rope.number("beta_slow", default=1.0),
        truncate=rope.get("truncate", bool, default=True),
        amplitude=_yarn_amplitude(rope),
    )


def rope_settings(read: Reader) -> Reader:
    """The settings, wherever the config has them; empty if it has none."""
    settings = dict(read.get("rope_scaling", dict, default={}))
    settings |= read.get("rope_parameters", dict, default={})
    return Reader(settings, f"{read.where} (rope settings)")


def yarn_mscale(factor: float, weight: float = 1.0) -> float:
    """YaRN's temperature for a context stretched by `factor` (Peng et al. 2023, equation 22).

    Args:
        factor: of stretching.
        weight: the model's own weight on it: `mscale` or `mscale_all_dim`.
    """
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1.0 else 1.0


def _yarn_amplitude(rope: Reader) -> float:
    """What rotated queries and keys are multiplied by: stated, or the quotient of the temperatures.

    A model with both `mscale` and `mscale_all_dim` has the latter in its softmax scale already.
    """
    factor = rope.number("factor")
    rotated, everywhere = (rope.number(key, default=0.0) for key in ("mscale", "mscale_all_dim"))
    implied = (
        yarn_mscale(factor, rotated) / yarn_mscale(factor, everywhere)
        if rotated and everywhere
        else yarn_mscale(factor)
    )
    return rope.number("attention_factor", default=implied)
