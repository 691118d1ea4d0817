"""RMSNorm, in float32 whatever the dtype of its input."""

from torch import Tensor, nn

from kvspan.layers.linear import Storage
from kvspan.layers.rows import row_ops


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
        return row_ops(x).rms_norm(x, self.weight, self.eps)

    def of_sum(self, x: Tensor, more: Tensor) -> Tensor:
        """Norm of x + more, both [R, size]; the sum is left in `x`."""
        return row_ops(x).add_rms_norm(x, more, self.weight, self.eps)
