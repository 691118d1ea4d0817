"""Linear layers of which a rank keeps a part. Knows groups; knows no models.

columns  a rank keeps some of the outputs: no exchange, its output is a slice
rows     a rank keeps some of the inputs: its output is a summand, the group adds them up
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kvspan.comm.group import Group
from kvspan.topology import Span


@dataclass(frozen=True, slots=True)
class Storage:
    """Where parameters lie, and as what.

    Args:
        dtype: of their elements.
        device: cpu, cuda, or meta for shapes alone.
    """

    dtype: torch.dtype
    device: torch.device

    def empty(self, *shape: int) -> nn.Parameter:
        """A parameter to be filled by a loader; it takes no gradient."""
        return nn.Parameter(
            torch.empty(shape, dtype=self.dtype, device=self.device), requires_grad=False
        )


class ColumnLinear(nn.Module):
    """Some outputs of a linear layer.

    Args:
        in_features: width of the input, whole on every rank.
        out_features: outputs that this rank keeps; may be 0.
        bias: whether the outputs have a bias.
    """

    def __init__(self, in_features: int, out_features: int, *, bias: bool, storage: Storage) -> None:
        super().__init__()
        self.weight = storage.empty(out_features, in_features)
        self.bias = storage.empty(out_features) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """[R, in_features] -> [R, out_features]."""
        return F.linear(x, self.weight, self.bias)


class RowLinear(nn.Module):
    """A linear layer over some of its inputs, summed over the group.

    Args:
        in_features: inputs that this rank keeps; may be 0.
        out_features: width of the output, whole on every rank.
        bias: whether there is one; every rank keeps it and the group's first rank adds it.
        group: the ranks whose inputs together are all of them.
    """

    def __init__(
        self, in_features: int, out_features: int, *, bias: bool, group: Group, storage: Storage
    ) -> None:
        super().__init__()
        self.group = group
        self.weight = storage.empty(out_features, in_features)
        self.bias = storage.empty(out_features) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """[R, in_features of this rank] -> [R, out_features], the sum over the group."""
        return self.group.all_reduce(self.summand(x)).wait()

    def summand(self, x: Tensor) -> Tensor:
        """[R, in_features of this rank] -> [R, out_features], what this rank adds to the sum."""
        return F.linear(x, self.weight, self.bias if self.group.rank == 0 else None)


def gather_columns(x: Tensor, group: Group, parts: Sequence[Span]) -> Tensor:
    """Puts everybody's columns side by side.

    Args:
        x: [R, parts[rank].size], this rank's columns.
        group: who has the others.
        parts: which columns each rank has, in order and without gaps.

    Returns:
        [R, sum of all sizes] on every rank.
    """
    return group.all_gather(x.t().contiguous(), [part.size for part in parts]).wait().t()
