"""Rotary position embedding. Knows the config's settings; knows no cache: K is stored rotated."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kvspan.config.rope import RopeConfig
from kvspan.layers.rows import row_ops, some_rows


@dataclass(frozen=True, slots=True)
class Rotation:
    """Angles of one step's rows.

    Args:
        cos: [R, 1, D / 2] float32.
        sin: [R, 1, D / 2] float32.
        interleaved: whether pairs are (2i, 2i + 1), or (i, i + D / 2).
    """

    cos: Tensor
    sin: Tensor
    interleaved: bool

    def of(self, rows: Tensor | slice) -> "Rotation":
        """Angles of some of the rows."""
        return Rotation(some_rows(self.cos, rows), some_rows(self.sin, rows), self.interleaved)

    def apply(self, x: Tensor) -> Tensor:
        """Rotates the last D elements of each head: [R, H, any + D] -> the same shape and dtype.

        What comes out has its pairs (i, i + D / 2) either way: queries and keys alike, and nothing but
        their products is ever asked for.
        """
        return row_ops(x).rotate(x, self.cos, self.sin, interleaved=self.interleaved)


class Rotary:
    """Makes the angles of a step, once for all layers.

    Args:
        rope: settings.
        head_dim: D, elements that are rotated.
        device: where the frequencies lie.
    """

    def __init__(self, rope: RopeConfig, *, head_dim: int, device: torch.device) -> None:
        self._rope = rope
        self._frequencies = inverse_frequencies(rope, head_dim=head_dim).to(device)

    def at(self, positions: Tensor) -> Rotation:
        """Angles for rows at `positions` [R] int64."""
        angles = positions.view(-1, 1, 1) * self._frequencies  # [R, 1, D / 2]
        cos, sin, amplitude = angles.cos(), angles.sin(), self._rope.amplitude
        if amplitude != 1.0:  # as it is in most models, and these operators are dear in a short step
            cos, sin = cos * amplitude, sin * amplitude
        return Rotation(cos, sin, self._rope.interleaved)


def inverse_frequencies(rope: RopeConfig, *, head_dim: int) -> Tensor:
    """[D / 2] float32, radians a position for each pair of dims."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    plain = 1.0 / rope.theta**exponents
    return plain / _divisors(rope, plain)


def _divisors(rope: RopeConfig, plain: Tensor) -> Tensor:
    """What stretching the context divides each frequency by."""
    if rope.kind == "linear":
        return torch.full_like(plain, rope.factor)
    if rope.kind == "llama3":
        return _llama3_divisors(rope, plain)
    if rope.kind == "yarn":
        return _yarn_divisors(rope, len(plain))
    if rope.kind == "divisors":
        return torch.tensor(rope.divisors, dtype=torch.float32)
    return torch.ones_like(plain)


def _llama3_divisors(rope: RopeConfig, plain: Tensor) -> Tensor:
    """Llama 3.1's rule: long waves are stretched by the factor, short ones left, a ramp between.

    The ramp is linear in the number of waves that fit the original context (Llama 3.1 release,
    `apply_scaling` of its reference model).
    """
    waves = rope.original_max_positions * plain / (2 * math.pi)
    ramp = (waves - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    return _blended(ramp, rope.factor)


def _yarn_divisors(rope: RopeConfig, num_frequencies: int) -> Tensor:
    """YaRN's rule (Peng et al. 2023): as llama3's, but the ramp is linear in the frequency's index."""

    def index_of(turns: float) -> float:
        """The frequency that turns so often in the original context."""
        wavelength = rope.original_max_positions / turns
        return num_frequencies * math.log(wavelength / (2 * math.pi)) / math.log(rope.theta)

    kept_to, stretched_from = index_of(rope.beta_fast), index_of(rope.beta_slow)
    if rope.truncate:
        kept_to, stretched_from = math.floor(kept_to), math.ceil(stretched_from)
    kept_to, stretched_from = max(kept_to, 0), min(stretched_from, 2 * num_frequencies - 1)
    width = (stretched_from - kept_to) or 0.001
    ramp = 1.0 - (torch.arange(num_frequencies, dtype=torch.float32) - kept_to) / width
    return _blended(ramp, rope.factor)


def _blended(ramp: Tensor, factor: float) -> Tensor:
    """Divisors where a share `ramp`, cut to [0, 1], of a frequency is kept and the rest is stretched."""
    kept = ramp.clamp(0.0, 1.0)
    return 1.0 / (kept + (1.0 - kept) / factor)
