"""When a prompt's rows are worth sharing out over PCP coordinates: as soon as multiplying takes longest.

Knows rates; measures nothing.
"""

import math

from kvspan.cost.choice import Choice
from kvspan.cost.facts import Rates

ROWS_OF_A_CHUNK = 16
"""Rows under which a linear layer is bound by reading its weights, which every coordinate reads whole.

A core multiplies about 8 rows of bf16 while it reads a weight (170 GFLOP/s beside 20 GB/s, measured in
docs/results/cpu.md). For a machine whose rates are not known."""


def least_tokens_to_split(pcp_size: int, rates: Rates | None = None) -> int:
    """New tokens from which on a row is cut in 2P chunks: a shorter one computes no faster for it.

    Args:
        pcp_size: P.
        rates: of a rank, if they are known.
    """
    return 2 * pcp_size * (ROWS_OF_A_CHUNK if rates is None else rows_bound_by_reading(rates))


def rows_bound_by_reading(rates: Rates) -> int:
    """Rows that a bf16 weight is multiplied with in the time that reading it takes: at least 1.

    A weight of 2 bytes takes 2 operations a row, so it is operations a second over bytes a second.
    """
    return max(math.ceil(rates.gemm_tflops["bf16"] * 1e3 / rates.weights_gbs), 1)


def choose_split(pcp_size: int, rates: Rates | None) -> Choice[int]:
    """New tokens from which on a row is cut, and why.

    Args:
        pcp_size: P.
        rates: of a rank, if they are known.
    """
    least = least_tokens_to_split(pcp_size, rates)
    if pcp_size == 1:
        return Choice(least)
    return Choice(
        least,
        f"chunks of under {least // (2 * pcp_size)} rows would take as long as it takes to read the "
        "weights, which every PCP coordinate reads whole.",
    )
