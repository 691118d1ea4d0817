"""When a prompt's rows are worth sharing out over PCP coordinates. Knows rows; measures nothing."""

ROWS_OF_A_CHUNK = 16
"""Rows under which a linear layer is bound by reading its weights, which every coordinate reads whole.

A core multiplies about 8 rows of bf16 while it reads a weight (170 GFLOP/s beside 20 GB/s, measured in
docs/results/cpu.md), and a GPU more."""


def least_tokens_to_split(pcp_size: int) -> int:
    """New tokens from which on a row is cut in 2P chunks: a shorter one computes no faster for it.

    Args:
        pcp_size: P.
    """
    return 2 * pcp_size * ROWS_OF_A_CHUNK
