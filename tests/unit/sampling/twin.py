"""A sampler that takes one token at a time, in plain Python."""

import math
from collections.abc import Sequence

from kvspan.request import SamplingParams


def twin_weights(logits: Sequence[float], p: SamplingParams) -> list[float]:
    """Weights of the tokens that may be drawn, the most probable having 1."""
    top = max(logits)
    weights = [math.exp((x - top) / p.temperature) for x in logits]
    ranked = sorted(range(len(logits)), key=lambda t: (-logits[t], t))
    ranked = [t for t in ranked if weights[t] >= p.min_p]
    if p.top_k > 0:
        ranked = ranked[: p.top_k]
    whole, kept, so_far = sum(weights[t] for t in ranked), set(), 0.0
    for token in ranked:
        if so_far < p.top_p * whole or p.top_p == 1:
            kept.add(token)
        so_far += weights[token]
    return [w if t in kept else 0.0 for t, w in enumerate(weights)]


def twin(logits: Sequence[float], p: SamplingParams, share: float) -> int:
    """The first token at which the running sum of the weights passes a share of the whole."""
    weights = twin_weights(logits, p)
    goal, so_far = share * sum(weights), 0.0
    for token, weight in enumerate(weights):
        so_far += weight
        if so_far > goal:
            return token
    raise AssertionError("the sum of all weights is more than a part of it")
