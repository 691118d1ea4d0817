"""What users ask: lengths, sharing and turns of agents, as streams of trace rows. Knows no engine.

An agent is a session: its first prompt begins with a part that its group shares, and each further turn
adds some tokens to it. When its turns are over another agent takes its place.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice

import numpy as np
from numpy.random import Generator

from kvspan.errors import ConfigError
from kvspan.trace.row import BLOCK_TOKENS, TraceRow, num_blocks

Quantiles = tuple[tuple[float, int], ...]
"""(share of prompts, that are no longer than so many tokens), ascending; straight lines between."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Requests as a mean, for closed formulas.

    Args:
        input_tokens: of a prompt.
        output_tokens: that it gets.
        shared_tokens: at its beginning, equal in all requests.
        kept_tokens: after those, that the user's request before had too (the turns of a session).
    """

    input_tokens: int
    output_tokens: int
    shared_tokens: int = 0
    kept_tokens: int = 0

    def __post_init__(self) -> None:
        if self.input_tokens < 1:
            raise ConfigError(f"--input {self.input_tokens} is too small: a prompt has 1 token or more.")
        if self.output_tokens < 1:
            raise ConfigError(f"--output {self.output_tokens} is too small: 1 token or more.")
        assert 0 <= self.shared_tokens + self.kept_tokens <= self.input_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Agents:
    """A population of agents.

    Args:
        input_tokens: quantiles of all prompts.
        output_tokens: of each turn.
        new_tokens: that a turn adds to the prompt, what the model said before among them.
        turns: of a session at the most; in them a prompt grows by half its mean length at the most.
        shared_prefix: share of a session's first prompt that the agents of a group have in common.
        groups: of agents.
        longest: tokens of the longest session; quantiles are cut there.
        seed: fixes everything.
    """

    input_tokens: Quantiles
    output_tokens: int
    new_tokens: int = 1
    turns: int = 1
    shared_prefix: float = 0.0
    groups: int = 1
    longest: int = 1 << 40
    seed: int = 0

    def users(self, num_users: int) -> list[Iterator[TraceRow]]:
        """Endless rows of `num_users` agents, each of which begins somewhere in a session."""
        fresh = count(self.groups << 32)  # ids under it are those of groups
        return [self._user(user, fresh) for user in range(num_users)]

    def _user(self, user: int, fresh: Iterator[int]) -> Iterator[TraceRow]:
        draw = np.random.default_rng([self.seed, user])
        length = self._length(draw)
        skipped = int(draw.integers(self._turns(length)))
        while True:
            yield from islice(self._session(length, draw, fresh), skipped, None)
            length, skipped = self._length(draw), 0
            while draw.random() * self._turns(length) > 1:  # sessions of many turns make more prompts
                length = self._length(draw)

    def _session(self, length: int, draw: Generator, fresh: Iterator[int]) -> Iterator[TraceRow]:
        """Rows of a session whose prompts have `length` tokens in the mean."""
        turns = self._turns(length)
        first = max(length - self.new_tokens * (turns - 1) // 2, 1)
        group = int(draw.integers(self.groups))
        ids = [(group << 32) + i for i in range(int(first * self.shared_prefix) // BLOCK_TOKENS)]
        for turn in range(turns):
            tokens = first + turn * self.new_tokens
            ids = [*ids, *islice(fresh, num_blocks(tokens, BLOCK_TOKENS) - len(ids))]
            yield TraceRow(0.0, tokens, self.output_tokens, tuple(ids))
            ids = ids[: tokens // BLOCK_TOKENS]  # a block that fills up is another one

    def _turns(self, length: int) -> int:
        return min(self.turns, 1 + length // (2 * self.new_tokens))

    def _length(self, draw: Generator) -> int:
        """A prompt's length, from among those within `longest`."""
        while True:
            length = int(quantile(self.input_tokens, draw.random()))
            if length + self.new_tokens * self._turns(length) // 2 < self.longest:
                return max(length, 1)


def quantile(points: Sequence[tuple[float, int]], share: float) -> float:
    """The length that a share of prompts does not exceed, on straight lines of log length.

    Args:
        points: (share, tokens), ascending, from share 0 to share 1; one point alone is every length.
        share: 0..1.
    """
    if len(points) == 1:
        return points[0][1]
    right = min(max(bisect_right(points, share, key=lambda p: p[0]), 1), len(points) - 1)
    (share0, low), (share1, high) = points[right - 1], points[right]
    return float(low * (high / low) ** ((share - share0) / (share1 - share0)))
