"""Attention over all keys from attention over shards of them: exact, by log-sum-exp.

Over the keys of shard r, attention gives O_r, normalised over those keys, and LSE_r = log sum
exp(score). Over all keys it is

    LSE = log sum_r exp(LSE_r)        O = sum_r exp(LSE_r - LSE) O_r

for ANY partition of the keys, so it does not matter where a token lives. LSE is float32 and base e at
every interface; sums are made in float32. A shard that saw no key is (0, -inf), and so is one whose
LSE is NaN or +inf: an empty softmax, whose output must not leak (0 * NaN is NaN).

Knows tensors of partials. Knows no ranks, no cache and no layers.
"""

import math

import torch
from torch import Tensor


def merge_shards(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over all shards of a sequence.

    Args:
        out: [W, R, H, D]; each shard's output for R queries, normalised over its own keys.
        lse: [W, R, H] float32, natural log; not finite = the shard saw no key.

    Returns:
        out [R, H, D] in `out.dtype`, and lse [R, H] float32; (0, -inf) where no shard saw a key.
    """
    weights, total = shard_weights(lse)
    return weighted_sum(out, weights[..., None]).to(out.dtype), total


class Merged:
    """Attention over keys that come part by part, in any order. One part alone is taken as it is.

    Args:
        shape: [R, H, D] of the whole.
        device: where it lies.
    """

    def __init__(self, *shape: int, device: torch.device) -> None:
        self.out = torch.zeros((), device=device).expand(shape)
        self.lse = self.out.new_full((), -torch.inf).expand(shape[:2])
        self._is_empty = True

    def add(self, rows: slice | Tensor, out: Tensor, lse: Tensor) -> None:
        """Takes in what some rows see in a part.

        Args:
            rows: n of the R, no row twice.
            out: [n, H, D], normalised over the part's keys; 0 where a row sees none of them.
            lse: [n, H] float32, natural log. Both may be written over.
        """
        is_first, self._is_empty = self._is_empty, False
        if is_first and isinstance(rows, slice) and len(lse) == len(self.lse):
            self.out, self.lse = out, lse
            return
        self.out, self.lse = self.out.float().contiguous(), self.lse.contiguous()
        weights, self.lse[rows] = shard_weights(torch.stack([self.lse[rows], lse]))
        self.out[rows] = self.out[rows].lerp(out.float(), weights[1, ..., None])


def shard_weights(lse: Tensor) -> tuple[Tensor, Tensor]:
    """The share that each shard has in the softmax over all keys.

    Args:
        lse: [W, ...], natural log; not finite = the shard saw no key.

    Returns:
        weights [W, ...], in [0, 1], summing to 1 over the shards, or all 0 where no shard saw a key;
        and the LSE [...] over all keys, -inf where there is none. Both in `lse.dtype`.
    """
    lse = lse.masked_fill(~lse.isfinite(), -torch.inf)
    total = lse.logsumexp(dim=0)
    return (lse - total.masked_fill(total == -torch.inf, 0.0)).exp(), total


def weighted_sum(out: Tensor, weights: Tensor) -> Tensor:
    """Sums shards' outputs by their weights, in `weights.dtype`; a weight of 0 silences even NaN.

    Args:
        out: [W, ...].
        weights: [W, ...], broadcast against `out`.

    Returns:
        [...], the sum over dim 0.
    """
    return torch.where(weights > 0, out.to(weights.dtype) * weights, 0.0).sum(dim=0)


def natural_lse(lse: Tensor, *, base: float) -> Tensor:
    """Converts an LSE that a kernel made in another base, at that kernel's own border.

    Args:
        lse: log to `base` of the sum of `base ** score`.
        base: e.g. 2.0 for kernels that use exp2.

    Returns:
        The same in natural log.
    """
    return lse * math.log(base)
