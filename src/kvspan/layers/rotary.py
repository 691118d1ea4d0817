"""Rotary position embedding. Knows the config's settings; knows no cache: K is stored rotated."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kvspan.config.model import RopeConfig
from kvspan.layers.rows import row_ops


@dataclass(frozen=True, slots=True)
class Rotation:
    """Angles of one step's rows.

    Args:
        cos: [R, 1, D / 2] float32.
        sin: [R, 1, D / 2] float32.
    """

    cos: Tensor
    sin: Tensor

    def apply(self, x: Tensor) -> Tensor:
        """Rotates pairs (i, i + D / 2) of the last dim: [R, H, D] -> the same shape and dtype."""
        return row_ops(x).rotate(x, self.cos, self.sin)


class Rotary:
    """Makes the angles of a step, once for all layers.

    Args:
        rope: settings.
        head_dim: D.
        device: where the frequencies lie.
    """

    def __init__(self, rope: RopeConfig, *, head_dim: int, device: torch.device) -> None:
        self._frequencies = inverse_frequencies(rope, head_dim=head_dim).to(device)

    def at(self, positions: Tensor) -> Rotation:
        """Angles for rows at `positions` [R] int64."""
        angles = torch.outer(positions.float(), self._frequencies)[:, None]  # [R, 1, D / 2]
        return Rotation(angles.cos(), angles.sin())


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
    kept = ramp.clamp(0.0, 1.0)  # share of the unstretched frequency
    return 1.0 / (kept + (1.0 - kept) / rope.factor)
