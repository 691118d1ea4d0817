"""What a trace asks for: lengths, and how much of its prompts a prefix cache could find. No tokens."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvspan.errors import ConfigError
from kvspan.trace.row import Trace, TraceRow, block_lengths

K = 1024
BUCKET_EDGES_TOKENS = (32 * K, 64 * K, 128 * K, 200 * K)
"""Where the published figures on agents cut input lengths."""


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """How a quantity is distributed; percentiles are interpolated between neighbours, as numpy does."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float] | NDArray[np.integer[Any]]) -> "Spread":
        """The spread of at least one value."""
        p50, p90, p99 = np.percentile(values, (50, 90, 99)).tolist()
        return cls(mean=float(np.mean(values)), p50=p50, p90=p90, p99=p99, max=float(np.max(values)))


class Bucket(msgspec.Struct, frozen=True, kw_only=True):
    """A range of input lengths.

    Args:
        name: e.g. `64-128K`; K is 1024 tokens, before scaling.
        least: tokens from which on a row belongs to it.
        limit: tokens from which on it does not; None = there is none.
    """

    name: str
    least: int
    limit: int | None

    def holds(self, input_length: int) -> bool:
        """Whether a prompt of so many tokens belongs to it."""
        return self.least <= input_length and (self.limit is None or input_length < self.limit)


class BucketCount(msgspec.Struct, frozen=True, kw_only=True):
    """What of a trace lies in a bucket; shares are of all rows and of all their input tokens."""

    bucket: str
    num_rows: int
    rows_share: float
    tokens_share: float


class TraceStats(msgspec.Struct, frozen=True, kw_only=True):
    """A trace in figures.

    Args:
        num_rows: requests.
        duration_s: from the first to the last.
        requests_per_s: mean rate; 0 when all come at once.
        input_tokens: lengths of prompts.
        output_tokens: lengths of outputs.
        buckets: rows by length of prompt.
        total_input_tokens: of all prompts together.
        unique_input_tokens: those of them that no earlier row had in the same place.
        reuse: total over unique.
        hit_unit: tokens in which a cache finds prefixes again.
        ideal_hit_rate: share of the input tokens that a cache of any size would find, whole units
            only; the last token of a prompt is always computed.
    """

    num_rows: int
    duration_s: float
    requests_per_s: float
    input_tokens: Spread
    output_tokens: Spread
    buckets: tuple[BucketCount, ...]
    total_input_tokens: int
    unique_input_tokens: int
    reuse: float
    hit_unit: int
    ideal_hit_rate: float


def trace_stats(trace: Trace, *, hit_unit: int = 1, scale: int = 1) -> TraceStats:
    """Counts a trace.

    Args:
        trace: its rows, at least one.
        hit_unit: tokens in which a cache finds prefixes: with kvspan the block size.
        scale: what the trace's lengths were divided by; the buckets' are too.

    Raises:
        ConfigError: `hit_unit` or `scale` is less than 1.
    """
    if min(hit_unit, scale) < 1:
        raise ConfigError(f"--hit-unit {hit_unit} and --scale {scale} must both be at least 1.")
    inputs = np.array([row.input_length for row in trace.rows])
    known = known_prefixes(trace)
    duration_s = (trace.rows[-1].timestamp_ms - trace.rows[0].timestamp_ms) / 1000
    total, unique = int(inputs.sum()), int((inputs - known).sum())
    hits = sum(min(k, n - 1) // hit_unit * hit_unit for k, n in zip(known, inputs.tolist(), strict=True))
    return TraceStats(
        num_rows=len(inputs),
        duration_s=duration_s,
        requests_per_s=len(inputs) / duration_s if duration_s else 0.0,
        input_tokens=Spread.of(inputs),
        output_tokens=Spread.of([row.output_length for row in trace.rows]),
        buckets=tuple(_count(bucket, inputs.tolist()) for bucket in length_buckets(scale)),
        total_input_tokens=total,
        unique_input_tokens=unique,
        reuse=total / unique,
        hit_unit=hit_unit,
        ideal_hit_rate=hits / total,
    )


def length_buckets(scale: int = 1) -> tuple[Bucket, ...]:
    """The buckets of input lengths, in order; every length lies in one.

    Args:
        scale: what lengths were divided by.
    """
    edges = [0, *(edge // scale for edge in BUCKET_EDGES_TOKENS)]
    limits = [*edges[1:], None]
    in_k = [edge // K for edge in BUCKET_EDGES_TOKENS]
    names = [
        f"<{in_k[0]}K",
        *(f"{a}-{b}K" for a, b in pairwise(in_k)),
        f"{in_k[-1]}K+",
    ]
    return tuple(Bucket(name=n, least=a, limit=b) for n, a, b in zip(names, edges, limits, strict=True))


def known_prefixes(trace: Trace) -> list[int]:
    """For each row, how many of its first tokens an earlier row began with too.

    Args:
        trace: the rows.
    """
    seen: dict[int, int] = {}  # id -> the most tokens that any row had of its block
    return [_known_prefix(row, trace.block_tokens, seen) for row in trace.rows]


def _known_prefix(row: TraceRow, block_tokens: int, seen: dict[int, int]) -> int:
    """The known tokens of a row's prefix; remembers the row's blocks."""
    known, goes_on = 0, True
    for hash_id, length in zip(row.hash_ids, block_lengths(row, block_tokens), strict=True):
        before = seen.get(hash_id, 0)
        if goes_on:
            known += min(before, length)
            goes_on = before >= block_tokens
        seen[hash_id] = max(before, length)
    return known


def _count(bucket: Bucket, input_lengths: Sequence[int]) -> BucketCount:
    inside = [length for length in input_lengths if bucket.holds(length)]
    return BucketCount(
        bucket=bucket.name,
        num_rows=len(inside),
        rows_share=len(inside) / len(input_lengths),
        tokens_share=sum(inside) / sum(input_lengths),
    )
