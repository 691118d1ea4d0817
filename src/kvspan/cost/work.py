"""What is in a step, in sums over its rows, and which of them attend in a way of their own.

Knows no times and no ranks but this: how many coordinates share rows (`cost.rows`).
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from kvspan.cost.prefill import PrefillRule


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWork:
    """What is in a step, in sums over its rows; numbers may be means, and so not whole.

    Args:
        num_tokens: R, rows in the sense of the mathematics: tokens computed.
        num_sampled: of them that a token is sampled after.
        keys: of each sequence, keys in the cache that its rows see, summed: they are read once.
        pairs: (row, key) pairs that attention computes.
        whole_tokens: rows of sequences that PCP coordinates do not cut: decodes, short prompts.
        expanded_tokens: rows of latent attention for which keys and values are made of latents.
        expanded_keys: part of `keys` that is made so.
        expanded_pairs: part of `pairs` of those rows.
        local_tokens: rows that stay with their heads, and exchange nothing.
        local_keys: part of `keys` of their sequences.
        gathered_keys: part of those that come to them: what was cached before the step.
        only_decodes: whether each row is the only one of its sequence.
    """

    num_tokens: float
    num_sampled: float
    keys: float
    pairs: float
    whole_tokens: float = 0.0
    expanded_tokens: float = 0.0
    expanded_keys: float = 0.0
    expanded_pairs: float = 0.0
    local_tokens: float = 0.0
    local_keys: float = 0.0
    gathered_keys: float = 0.0
    only_decodes: bool = False

    @classmethod
    def of(
        cls, chunks: Iterable[tuple[int, int]], *, num_sampled: int, ways: "Ways | None" = None
    ) -> "StepWork":
        """Sums over the sequences of a step.

        Args:
            chunks: (tokens computed before, tokens to compute) of each sequence.
            num_sampled: sequences that get a token.
            ways: of attention; None = every row asks the cache, and no sequence is cut.
        """
        tokens = keys = decodes = 0
        pairs = 0.0
        prompts = []
        for start, num_tokens in chunks:
            tokens += num_tokens
            keys += start + num_tokens
            if num_tokens == 1:
                decodes += 1
                pairs += start + 1
            else:
                pairs += num_tokens * (start + (num_tokens + 1) / 2)
                prompts.append((start, num_tokens))
        special = ways.of(prompts) if ways is not None else {"whole_tokens": float(tokens - decodes)}
        whole = decodes + special.pop("whole_tokens", 0.0)
        return cls(
            num_tokens=tokens,
            num_sampled=num_sampled,
            keys=keys,
            pairs=pairs,
            whole_tokens=whole,
            only_decodes=not prompts,
            **special,
        )

    def busiest_rows(self, pcp_size: int) -> float:
        """Rows of the coordinate that has most of them; of a mean, the mean.

        Args:
            pcp_size: P.
        """
        least = math.floor(self.whole_tokens)
        between = self.whole_tokens - least
        whole = (1 - between) * -(-least // pcp_size) + between * -(-(least + 1) // pcp_size)
        return (self.num_tokens - self.whole_tokens) / pcp_size + whole


@dataclass(frozen=True, slots=True)
class Ways:
    """Which rows of prompts attend in a way of their own; a decoded token always asks the cache.

    Args:
        expand_from: tokens of a sequence from which on its latents are expanded.
        cut_from: tokens of a sequence from which on PCP coordinates share them.
        rule: which sequences have their keys gathered, and so stay with their heads.
        latent: whether what is gathered is latents, which are then expanded.
    """

    expand_from: int
    cut_from: int
    rule: PrefillRule
    latent: bool

    def of(self, prompts: Sequence[tuple[float, float]]) -> dict[str, float]:
        """The fields of `StepWork` that these prompts make.

        Args:
            prompts: (tokens computed before, tokens to compute) of each.
        """
        if not prompts:
            return {}
        start, rows = np.array(prompts, np.float64).T
        local = self.rule.gathers(rows.astype(np.int64), start.astype(np.int64))
        expanded = (rows >= self.expand_from) | (local & self.latent)
        keys = start + rows
        return {
            "whole_tokens": float(rows[rows < self.cut_from].sum()),
            "expanded_tokens": float(rows[expanded].sum()),
            "expanded_keys": float(keys[expanded].sum()),
            "expanded_pairs": float((rows * (start + (rows + 1) / 2))[expanded].sum()),
            "local_tokens": float(rows[local].sum()),
            "local_keys": float(keys[local].sum()),
            "gathered_keys": float(start[local].sum()),
        }


def decode_work(context_tokens: float, *, batch: float) -> StepWork:
    """A step in which each of `batch` sequences of `context_tokens` tokens gets one more.

    Args:
        context_tokens: tokens that each row sees, itself included.
        batch: rows.
    """
    keys = context_tokens * batch
    return StepWork(
        num_tokens=batch,
        num_sampled=batch,
        keys=keys,
        pairs=keys,
        whole_tokens=batch,
        only_decodes=True,
    )


def distinct_experts(num_experts: int, *, experts_per_token: int, num_tokens: float) -> float:
    """Experts of a layer that some row of a step goes to, expected when rows choose evenly.

    Args:
        num_experts: E, that there are.
        experts_per_token: k.
        num_tokens: rows.
    """
    return float(num_experts * (1 - (1 - experts_per_token / num_experts) ** num_tokens))
