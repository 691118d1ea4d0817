"""Made-up traces with the statistics of observed ones. A profile is data; a seed fixes every row.

Lengths come first: each row's is read off the profile's distribution, evenly, so that even short traces
have its shares. Then rows are strung together into sessions whose turns extend one another.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from kvspan.errors import ConfigError
from kvspan.trace.row import BLOCK_TOKENS, Trace, TraceRow
from kvspan.trace.stats import K


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """What a kind of traffic looks like.

    Args:
        input_quantiles: (share of rows, tokens) in ascending order from share 0 to 1: that many rows
            have shorter prompts. In between, tokens are interpolated by their logarithm.
        output_mean: tokens of an output; they are log-normal.
        output_sigma: standard deviation of their logarithm.
        turns_mean: turns of a session; geometric.
        turn_growth: tokens by which a turn's prompt exceeds the last one's, at the most ...
        turn_growth_share: ... or, for long prompts, this share of itself.
        turn_gap_s: seconds between turns of a session, on average.
        shared_blocks: blocks that all but the shortest sessions begin with: system prompt and tools.
        source: where the figures are from.
    """

    input_quantiles: tuple[tuple[float, int], ...]
    output_mean: float
    output_sigma: float
    turns_mean: float
    turn_growth: int
    turn_growth_share: float
    turn_gap_s: float
    shared_blocks: int
    source: str


PROFILES = {
    "agentic": Profile(
        input_quantiles=(
            (0.0, 512),
            (0.18, 8 * K),
            (0.47, 64 * K),
            (0.5, 67 * K),
            (0.92, 128 * K),
            (0.965, 256 * K),
            (1.0, 1024 * K),
        ),
        output_mean=400.0,
        output_sigma=0.5,
        turns_mean=12.0,
        turn_growth=8 * K,
        turn_growth_share=0.25,
        turn_gap_s=20.0,
        shared_blocks=4,
        source="input lengths as published for coding agents: median 67K, 53% over 64K, 18% under 8K, "
        "8% over 128K, 3-4% over 256K, up to 1M; output about 400. Turns and their growth are assumed.",
    ),
    "mixed": Profile(
        input_quantiles=((0.0, 256), (0.7999, 2 * K), (0.8, 16 * K), (1.0, 32 * K)),
        output_mean=400.0,
        output_sigma=0.5,
        turns_mean=1.0,
        turn_growth=0,
        turn_growth_share=0.0,
        turn_gap_s=0.0,
        shared_blocks=0,
        source="made up to try a span for each request: 80% under 2K and 20% over 16K, single turns "
        "that share nothing; output about 400.",
    ),
    "short": Profile(
        input_quantiles=((0.0, 256), (1.0, 2 * K)),
        output_mean=400.0,
        output_sigma=0.5,
        turns_mean=1.0,
        turn_growth=0,
        turn_growth_share=0.0,
        turn_gap_s=0.0,
        shared_blocks=0,
        source="the short requests of mixed alone.",
    ),
}
"""Name -> profile."""


def synthesize(profile: Profile, *, num_rows: int, rate_per_s: float = 1.0, seed: int = 0) -> Trace:
    """Makes a trace.

    Args:
        profile: its statistics.
        num_rows: requests.
        rate_per_s: requests a second, on average.
        seed: fixes it.

    Raises:
        ConfigError: a number is not positive.
    """
    if num_rows < 1:
        raise ConfigError(f"--rows {num_rows} is too few: 1 or more.")
    if not 0 < rate_per_s < float("inf"):
        raise ConfigError(f"--rate {rate_per_s:g} must be more than 0 requests a second.")
    rng = np.random.default_rng(seed)
    sessions = _sessions(profile, _input_lengths(profile, num_rows, rng), rng)
    duration_s = num_rows / rate_per_s
    timed = [
        (time_s, session, turn)
        for session in sessions
        for turn, time_s in enumerate(_turn_times(profile, len(session.inputs), duration_s, rng))
    ]
    timed.sort(key=lambda each: each[0])
    ids = _Ids(profile.shared_blocks)
    rows = [
        TraceRow(
            timestamp_ms=float(round(time_s * 1000)),
            input_length=session.inputs[turn],
            output_length=session.outputs[turn],
            hash_ids=ids.of(session, turn),
        )
        for time_s, session, turn in timed
    ]
    return Trace(tuple(rows), BLOCK_TOKENS)


@dataclass(slots=True, eq=False)
class _Session:
    """Turns of one conversation: a prompt holds the last one, its output, and something new."""

    turns_left: int
    inputs: list[int] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)

    def add(self, input_length: int, output_length: int) -> None:
        self.inputs.append(input_length)
        self.outputs.append(output_length)
        self.turns_left -= 1

    def can_grow_to(self, input_length: int, max_growth: float) -> bool:
        """Whether a prompt of this length could be its next turn."""
        held = self.inputs[-1] + self.outputs[-1]
        return self.turns_left > 0 and held < input_length <= self.inputs[-1] + max_growth


class _Ids:
    """Hands out ids in order of first appearance, as the public traces do."""

    def __init__(self, shared_blocks: int) -> None:
        self._shared_blocks = shared_blocks
        self._known: dict[tuple[int, int, int], int] = {}

    def of(self, session: _Session, turn: int) -> tuple[int, ...]:
        """The ids of a turn's blocks. A partial one is its own: the next turn goes on differently."""
        whole, rest = divmod(session.inputs[turn], BLOCK_TOKENS)
        keys = [(self._owner(session, block), block, 0) for block in range(whole)]
        keys += [(id(session), whole, turn + 1)] if rest else []
        return tuple(self._known.setdefault(key, len(self._known)) for key in keys)

    def _owner(self, session: _Session, block: int) -> int:
        """Whose block it is; 0 = everybody's. Sessions that begin with less than that share nothing."""
        shares = session.inputs[0] >= (self._shared_blocks + 1) * BLOCK_TOKENS
        return 0 if shares and block < self._shared_blocks else id(session)


def _input_lengths(profile: Profile, num_rows: int, rng: Generator) -> list[int]:
    """Lengths in ascending order, one drawn from each of `num_rows` equal shares of the distribution."""
    shares, tokens = zip(*profile.input_quantiles, strict=True)
    drawn = (np.arange(num_rows) + rng.random(num_rows)) / num_rows
    lengths: NDArray[np.float64] = np.exp(np.interp(drawn, shares, np.log(tokens)))
    return [int(length) for length in lengths.round()]


def _sessions(profile: Profile, lengths: Sequence[int], rng: Generator) -> list[_Session]:
    """Strings rows together: each goes to a session that it can be the next turn of, or begins one."""
    mu = np.log(profile.output_mean) - profile.output_sigma**2 / 2  # so that the mean is output_mean
    sessions: list[_Session] = []
    live: list[_Session] = []
    for length in lengths:
        max_growth = max(profile.turn_growth, profile.turn_growth_share * length)
        live = [each for each in live if each.inputs[-1] + max_growth >= length and each.turns_left]
        fitting = [each for each in live if each.can_grow_to(length, max_growth)]
        if fitting:
            session = fitting[int(rng.integers(len(fitting)))]
        else:
            session = _Session(int(rng.geometric(1 / profile.turns_mean)))
            sessions.append(session)
            live.append(session)
        session.add(length, max(1, round(float(rng.lognormal(mu, profile.output_sigma)))))
    return sessions


def _turn_times(profile: Profile, num_turns: int, duration_s: float, rng: Generator) -> list[float]:
    """Seconds at which a session's turns come, in order, somewhere in the trace."""
    gaps_s = rng.exponential(profile.turn_gap_s, num_turns - 1)
    spans_s = np.concatenate([[0.0], np.cumsum(gaps_s)])
    spans_s *= min(1.0, duration_s / max(spans_s[-1], 1e-9))
    return [float(t) for t in spans_s + rng.random() * (duration_s - spans_s[-1])]
