"""A small set of combinations in which every pair of values occurs: for the everyday run of a matrix."""

import itertools
import random
from collections.abc import Sequence


def pairwise(axes: Sequence[Sequence[object]], *, seed: int) -> list[tuple[object, ...]]:
    """Combinations of `axes` (one value of each) that cover every pair of values of two axes.

    Greedy: of the combinations, in an order that `seed` fixes, the one with most uncovered pairs next.
    """
    everything = list(itertools.product(*axes))
    random.Random(seed).shuffle(everything)
    uncovered = set().union(*(_pairs(c) for c in everything))
    chosen = []
    while uncovered:
        best = max(everything, key=lambda c: len(_pairs(c) & uncovered))
        uncovered -= _pairs(best)
        chosen.append(best)
    return chosen


def _pairs(combination: tuple[object, ...]) -> set[tuple[int, int, str, str]]:
    values = [str(value) for value in combination]
    return {(a, b, values[a], values[b]) for a, b in itertools.combinations(range(len(values)), 2)}
