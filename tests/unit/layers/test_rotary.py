"""Rotary frequencies against known values, and rotation against complex multiplication."""

import pytest
import torch

from kvspan.config.model import RopeConfig
from kvspan.layers.rotary import Rotary, inverse_frequencies

LLAMA31 = RopeConfig(
    kind="llama3",
    theta=500_000.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_positions=8192,
)
# Index of a frequency of Llama 3.1 (head_dim 128) -> its factor on the unscaled one, as published.
KNOWN = {0: 1.0, 28: 1.0, 29: 0.8282, 30: 0.6437, 34: 0.1902, 35: 0.125, 63: 0.125}


def test_llama31_frequencies() -> None:
    plain = inverse_frequencies(RopeConfig(theta=500_000.0), head_dim=128)
    scaled = inverse_frequencies(LLAMA31, head_dim=128)
    for index, factor in KNOWN.items():
        assert (scaled / plain)[index].item() == pytest.approx(factor, abs=5e-5)


def test_linear_and_divisors() -> None:
    plain = inverse_frequencies(RopeConfig(), head_dim=8)
    linear = inverse_frequencies(RopeConfig(kind="linear", factor=4.0), head_dim=8)
    assert torch.equal(linear, plain / 4)
    divisors = RopeConfig(kind="divisors", divisors=(1.0, 2.0, 4.0, 8.0))
    assert torch.equal(inverse_frequencies(divisors, head_dim=8), plain / torch.tensor([1, 2, 4, 8]))


def test_rotation_is_multiplication_by_a_complex_phase() -> None:
    rotary = Rotary(RopeConfig(), head_dim=8, device=torch.device("cpu"))
    x = torch.randn(5, 3, 8)
    positions = torch.tensor([0, 1, 7, 100, 4000])
    pairs = torch.complex(x[..., :4], x[..., 4:])
    angles = torch.outer(positions.float(), inverse_frequencies(RopeConfig(), head_dim=8))
    turned = pairs * torch.polar(torch.ones_like(angles), angles)[:, None]
    wanted = torch.cat([turned.real, turned.imag], dim=-1)
    torch.testing.assert_close(rotary.at(positions).apply(x), wanted, atol=1e-5, rtol=1e-5)
    assert torch.equal(rotary.at(positions).apply(x)[0], x[0])
