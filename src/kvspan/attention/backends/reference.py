"""The truth: attention written out in torch, in float32 (float64 for float64), one sequence at a time.

For tests, for ever: every other kernel is compared with it. Knows nothing of speed.
"""

import torch
from torch import Tensor

from kvspan.attention.contract import Cached, Capabilities, KeyIndex, mergeable, written_out


class ReferenceKernel:
    """Scores, mask, softmax, in that order, and nothing clever."""

    capabilities = Capabilities()

    def __call__(
        self, query: Tensor, keys: Cached, values: Cached, index: KeyIndex, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See `contract.Kernel`."""
        keys, values, index = written_out(keys, values, index)
        parts = [
            self._sequence(query[rows], keys, values, index, rows, table, scale)
            for rows, table in index.sequences()
        ]
        out = torch.cat([query.new_zeros(0, query.shape[1], values.shape[-1]), *(o for o, _ in parts)])
        lse = torch.cat([torch.zeros(0, query.shape[1], device=query.device), *(m for _, m in parts)])
        return out, lse

    def _sequence(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        index: KeyIndex,
        rows: slice,
        table: Tensor,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        first = torch.from_numpy(index.first[rows]).to(query.device)
        last = torch.from_numpy(index.last[rows]).to(query.device)
        num_keys = int(last.max()) if last.numel() else 0
        exact = torch.promote_types(query.dtype, torch.float32)
        k, v = (self._dense(x, table, num_keys, query.shape[1]).to(exact) for x in (keys, values))
        place = torch.arange(num_keys, device=query.device)
        seen = (first[:, None] <= place) & (place < last[:, None])  # [R, K]
        scores = torch.einsum("rhd,khd->rhk", query.to(exact), k) * scale
        scores = scores.masked_fill(~seen[:, None], -torch.inf)
        lse = scores.logsumexp(dim=-1)  # [R, H]; -inf for a row without keys, NaN with such a score
        weights = (scores - lse.masked_fill(lse == -torch.inf, 0.0)[..., None]).exp()
        return torch.einsum("rhk,khd->rhd", weights, v).to(query.dtype), mergeable(lse.float())

    @staticmethod
    def _dense(blocks: Tensor, table: Tensor, num_keys: int, num_heads: int) -> Tensor:
        """[K, H, D]: the first `num_keys` local tokens of a sequence, KV heads repeated for queries."""
        _, kv_heads, _, dim = blocks.shape
        tokens = blocks[table].transpose(1, 2).reshape(-1, kv_heads, dim)[:num_keys]
        return tokens.repeat_interleave(num_heads // kv_heads, dim=1)
