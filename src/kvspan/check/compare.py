"""Do two runs of the same prompts agree? Pure arithmetic on tokens and log-probabilities.

In float32 a layout must give one rank's tokens, and its log-probabilities to 1e-4. In a narrower dtype a
split changes rounding as much as the dtype itself does; so both are compared with float32, on its
tokens, and the layout may be little farther from it than one rank is.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

FP32_BOUND = 1e-4
"""Greatest difference of a log-probability (natural log) between a layout and one rank, in float32."""
NARROW_FACTOR = 1.25
"""How much farther from float32 a layout may be than one rank of the same dtype."""


@dataclass(frozen=True, slots=True)
class Position:
    """What a run said of one position of a sequence.

    Args:
        logprob: of the token that is there.
        best: most probable token.
        gap: by how much its log-probability exceeds the second one's.
    """

    logprob: float
    best: int
    gap: float


@dataclass(frozen=True, slots=True)
class Exact:
    """A float32 run of a layout beside one of one rank.

    Args:
        name: what was special about the run, e.g. `prefix cache warm`.
        num_tokens: output tokens compared.
        different: output tokens that differ.
        worst: greatest difference of a log-probability.
    """

    name: str
    num_tokens: int
    different: int
    worst: float

    @property
    def holds(self) -> bool:
        """Whether the run is within its bounds."""
        return self.different == 0 and self.worst <= FP32_BOUND


@dataclass(frozen=True, slots=True)
class Distance:
    """How far a run is from float32, position by position on the same tokens.

    Args:
        num_positions: positions compared.
        median: of the absolute differences of log-probabilities.
        p99: 99th percentile of them.
    """

    num_positions: int
    median: float
    p99: float


@dataclass(frozen=True, slots=True)
class Narrow:
    """A run of a layout in a narrower dtype, beside one rank of that dtype.

    Args:
        name: what was special about the run.
        one_rank: one rank's distance to float32.
        layout: the layout's distance to float32.
        one_rank_flips: positions where one rank's most probable token is not float32's although
            float32's top two are farther apart than one rank's p99.
        layout_flips: the same for the layout.
    """

    name: str
    one_rank: Distance
    layout: Distance
    one_rank_flips: int
    layout_flips: int

    @property
    def holds(self) -> bool:
        """Whether the run is within its bounds.

        One rank has flips too, a few in thousands of positions. Both are counts of rare events, whose
        difference has a variance of their sum; the layout's may exceed one rank's by three standard
        deviations of it. (So 9 beside 0: of 10 events that are as likely here as there, all are on one
        given side in one case of 1,024.)
        """
        more_flips = self.layout_flips - self.one_rank_flips
        allowed_more = 3 * math.sqrt(self.layout_flips + self.one_rank_flips + 1)
        return (
            self.layout.median <= NARROW_FACTOR * self.one_rank.median
            and self.layout.p99 <= NARROW_FACTOR * self.one_rank.p99
            and more_flips <= allowed_more
        )


def compare_exact(
    name: str, one_rank: Sequence[Sequence[Position]], layout: Sequence[Sequence[Position]]
) -> Exact:
    """Compares greedy outputs, one sequence of positions a prompt."""
    pairs = [(a, b) for x, y in zip(one_rank, layout, strict=True) for a, b in zip(x, y, strict=False)]
    lengths = sum(abs(len(x) - len(y)) for x, y in zip(one_rank, layout, strict=True))
    different = sum(a.best != b.best for a, b in pairs) + lengths
    worst = max((abs(a.logprob - b.logprob) for a, b in pairs if a.best == b.best), default=0.0)
    return Exact(name, len(pairs), different, worst)


def compare_narrow(
    name: str,
    exact: Sequence[Sequence[Position]],
    one_rank: Sequence[Sequence[Position]],
    layout: Sequence[Sequence[Position]],
) -> Narrow:
    """Compares two runs on the tokens of a float32 run with that run."""
    near, far = _distance(exact, one_rank), _distance(exact, layout)
    flips = [_flips(exact, run, beyond=near.p99) for run in (one_rank, layout)]
    return Narrow(name, near, far, *flips)


def _distance(exact: Sequence[Sequence[Position]], run: Sequence[Sequence[Position]]) -> Distance:
    differences = np.array([abs(a.logprob - b.logprob) for a, b in _pairs(exact, run)])
    return Distance(
        len(differences), float(np.median(differences)), float(np.percentile(differences, 99))
    )


def _flips(
    exact: Sequence[Sequence[Position]], run: Sequence[Sequence[Position]], *, beyond: float
) -> int:
    return sum(a.best != b.best and a.gap > beyond for a, b in _pairs(exact, run))


def _pairs(
    a: Sequence[Sequence[Position]], b: Sequence[Sequence[Position]]
) -> list[tuple[Position, Position]]:
    return [pair for x, y in zip(a, b, strict=True) for pair in zip(x, y, strict=True)]
