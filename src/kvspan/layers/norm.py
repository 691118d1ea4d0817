"""RMSNorm, in float32 whatever the dtype of its input."""

import torch
from torch import Tensor, nn

from kvspan.layers.linear import Storage


class RMSNorm(nn.Module):
    """Scales the last dim to a root mean square of 1, then by a learned weight.

    Args:
        size: elements of the last dim.
        eps: added to the mean square.
    """

    def __init__(self, size: int, *, eps: float, storage: Storage) -> None:
        super().__init__()
        self.eps = eps
        self.weight = storage.empty(size)

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> the same shape and dtype."""
        exact = x.float()
        scale = torch.rsqrt(exact.square().mean(dim=-1, keepdim=True) + self.eps)
        return self.weight * (exact * scale).to(x.dtype)
