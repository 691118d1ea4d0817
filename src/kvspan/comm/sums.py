"""Sums over ranks that have the same bits wherever they are made."""

from collections.abc import Sequence

import torch
from torch import Tensor


def sum_in_order(parts: Sequence[Tensor]) -> Tensor:
    """Sums in at least float32, one after the other, so that every transport gets the same bits.

    Args:
        parts: one of each rank, in order of rank, all of one shape and dtype.

    Returns:
        The sum, in their dtype.
    """
    exact = torch.promote_types(parts[0].dtype, torch.float32)
    total = parts[0].to(exact, copy=True)
    for part in parts[1:]:
        total += part
    return total.to(parts[0].dtype)
