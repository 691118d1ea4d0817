"""The one table of tolerances: how far two computations of the same thing may differ.

Movement (slots, tables, gathers of the same bits) has tolerance 0 and is compared with `torch.equal`.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Tolerance:
    """For `torch.testing.assert_close`: |a - b| <= atol + rtol * |b|."""

    atol: float
    rtol: float


TOLERANCES: dict[tuple[str, torch.dtype], Tolerance] = {
    ("attention", torch.float64): Tolerance(atol=1e-6, rtol=1e-6),
    ("attention", torch.float32): Tolerance(atol=1e-5, rtol=1e-5),
    ("attention", torch.float16): Tolerance(atol=2e-3, rtol=2e-3),
    ("attention", torch.bfloat16): Tolerance(atol=1e-2, rtol=1e-2),
    # Scores are made in float32 from inputs that both sides read alike, so the LSE is near exact.
    ("lse", torch.float32): Tolerance(atol=1e-5, rtol=1e-5),
    ("lse", torch.float16): Tolerance(atol=1e-3, rtol=1e-4),
    ("lse", torch.bfloat16): Tolerance(atol=1e-3, rtol=1e-4),
    # Of outputs of about unit size: what lies between an expert's two products is rounded as well.
    ("experts", torch.float32): Tolerance(atol=1e-5, rtol=1e-5),
    ("experts", torch.bfloat16): Tolerance(atol=1e-2, rtol=1e-2),
    ("logits", torch.float32): Tolerance(atol=1e-4, rtol=0.0),
    ("logprobs", torch.float32): Tolerance(atol=1e-4, rtol=0.0),
}
"""(what, dtype of the computation) -> bound."""


def assert_within(got: torch.Tensor, wanted: torch.Tensor, what: str, dtype: torch.dtype) -> None:
    """Fails unless `got` is within the table's bound of `wanted`; equal infinities are equal."""
    bound = TOLERANCES[what, dtype]
    torch.testing.assert_close(
        got.double(), wanted.double(), atol=bound.atol, rtol=bound.rtol, equal_nan=False
    )
