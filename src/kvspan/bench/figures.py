"""The figures of a replay: latencies, throughput, what the cache did. Pure functions of what was seen.

Throughput counts the **steady window** only: from when as many requests have ended as there are users
(an open loop: from the start) until there are too few left to send. Latencies are of all requests.

    TTFT  time to first token: from sending to the first piece of the answer
    TPOT  time per output token: from the first piece to the last, by the tokens after the first piece
    ITL   inter-token latency: between one piece and the next
    E2E   from sending to the end of the answer
"""

from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from kvspan.bench.record import Observed, Record, Sample
from kvspan.trace.stats import Bucket, Spread, length_buckets


class Latencies(msgspec.Struct, frozen=True, kw_only=True):
    """Milliseconds; None = no request had any.

    Args:
        num_requests: that were answered, at least in part.
        ttft_ms: time to first token.
        tpot_ms: time per output token, one value a request.
        itl_ms: between pieces, all requests' together.
        e2e_ms: of whole answers.
        tokens_per_s_per_user: 1000 / the median TPOT.
        output_tokens_per_s: of these requests, in the window.
    """

    num_requests: int
    ttft_ms: Spread | None
    tpot_ms: Spread | None
    itl_ms: Spread | None
    e2e_ms: Spread | None
    tokens_per_s_per_user: float | None
    output_tokens_per_s: float


class EngineFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine did in the window; None = it does not tell.

    Args:
        running_mean: requests computed at a time, over time.
        running_max: at the most.
        kv_used_mean: share of the KV cache that requests held, over time.
        kv_used_max: at the most.
        prefill_token_share: prompts' share of the computed tokens.
        prefill_time_share: share of the time that went to steps which computed prompts, too.
        preemptions: of the whole run.
    """

    running_mean: float | None
    running_max: int | None
    kv_used_mean: float | None
    kv_used_max: float | None
    prefill_token_share: float | None
    prefill_time_share: float | None
    preemptions: int | None


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """A run in figures.

    Args:
        num_ok: requests with a whole answer.
        num_errors: requests with an error.
        num_unfinished: requests under way when the run ended.
        errors: what went wrong, and how often.
        interrupted: whether somebody ended the run.
        duration_s: of the run.
        window_s: begin and end of the steady window, or of the whole run if it had none.
        requests_per_s: answers that became whole in the window.
        input_tokens_per_s: of prompts whose first token came in the window, found in the cache or not.
        output_tokens_per_s: that came in the window.
        output_tokens_per_s_per_rank: by rank.
        hit_rate: share of the prompts' tokens that were found in the cache; None = nobody said.
        lag_ms: by which requests were sent late.
        latencies: of all requests.
        by_length: likewise by length of prompt.
        engine: what the engine did.
    """

    num_ok: int
    num_errors: int
    num_unfinished: int
    errors: dict[str, int]
    interrupted: bool
    duration_s: float
    window_s: tuple[float, float]
    requests_per_s: float
    input_tokens_per_s: float
    output_tokens_per_s: float
    output_tokens_per_s_per_rank: float
    hit_rate: float | None
    lag_ms: Spread | None
    latencies: Latencies
    by_length: dict[str, Latencies]
    engine: EngineFigures


def figures(observed: Observed, *, num_ranks: int, scale: int = 1) -> Figures:
    """Counts a run.

    Args:
        observed: a run.
        num_ranks: that computed it.
        scale: what the trace's lengths were divided by; the buckets' are too.
    """
    records = observed.records
    window = steady_window(observed)
    lasts_s = max(window[1] - window[0], 1e-9)
    tokens_per_s = _tokens_in(records, window) / lasts_s
    started = [r for r in records if r.arrivals_s and window[0] <= r.arrivals_s[0] < window[1]]
    return Figures(
        num_ok=sum(r.ok for r in records),
        num_errors=sum(r.error is not None for r in records),
        num_unfinished=sum(r.end_s is None for r in records),
        errors=_count_errors(records),
        interrupted=observed.interrupted,
        duration_s=observed.end_s,
        window_s=window,
        requests_per_s=sum(r.ok and _inside(r.end_s or 0.0, window) for r in records) / lasts_s,
        input_tokens_per_s=sum(r.input_tokens for r in started) / lasts_s,
        output_tokens_per_s=tokens_per_s,
        output_tokens_per_s_per_rank=tokens_per_s / num_ranks,
        hit_rate=_hit_rate(started),
        lag_ms=_spread_ms(r.sent_s - r.due_s for r in records),
        latencies=latencies(records, window),
        by_length=_by_length(records, window, length_buckets(scale)),
        engine=_engine_figures(observed, window),
    )


def steady_window(observed: Observed) -> tuple[float, float]:
    """Begin and end, in seconds, of the time in which all users were at work; else of the whole run."""
    begin_s = observed.filled_s or 0.0
    end_s = observed.end_s if observed.drained_s is None else observed.drained_s
    return (begin_s, end_s) if end_s > begin_s else (0.0, observed.end_s)


def latencies(records: Sequence[Record], window: tuple[float, float]) -> Latencies:
    """Latencies of some requests, and their throughput in a window of seconds."""
    tpot_ms = _spread_ms(r.tpot_s for r in records)
    gaps_s = (gap for r in records for gap in np.diff(r.arrivals_s).tolist())
    return Latencies(
        num_requests=sum(bool(r.arrivals_s) for r in records),
        ttft_ms=_spread_ms(r.ttft_s for r in records),
        tpot_ms=tpot_ms,
        itl_ms=_spread_ms(gaps_s),
        e2e_ms=_spread_ms(r.e2e_s for r in records),
        tokens_per_s_per_user=1000 / tpot_ms.p50 if tpot_ms and tpot_ms.p50 else None,
        output_tokens_per_s=_tokens_in(records, window) / max(window[1] - window[0], 1e-9),
    )


def _by_length(
    records: Sequence[Record], window: tuple[float, float], buckets: Sequence[Bucket]
) -> dict[str, Latencies]:
    inside = {b.name: [r for r in records if b.holds(r.input_tokens)] for b in buckets}
    return {name: latencies(some, window) for name, some in inside.items() if some}


def _engine_figures(observed: Observed, window: tuple[float, float]) -> EngineFigures:
    samples = [s for s in observed.samples if _inside(s.start_s, window)]
    kv_used = [s.kv_used for s in samples if s.kv_used is not None]
    prefill = sum(s.prefill_tokens or 0 for s in samples)
    decoded = sum(s.output_tokens or 0 for s in samples)
    told = any(s.prefill_tokens is not None for s in samples)
    busy_s = sum(s.lasts_s for s in samples)
    prefill_s = sum(s.lasts_s for s in samples if s.prefill_tokens)
    return EngineFigures(
        running_mean=_mean_over_time(samples, [float(s.running) for s in samples]),
        running_max=max((s.running for s in samples), default=None),
        kv_used_mean=_mean_over_time(samples, kv_used) if len(kv_used) == len(samples) else None,
        kv_used_max=max(kv_used, default=None),
        prefill_token_share=prefill / (prefill + decoded) if told and prefill + decoded else None,
        prefill_time_share=prefill_s / busy_s if told and busy_s else None,
        preemptions=observed.preemptions,
    )


def _mean_over_time(samples: Sequence[Sample], values: Sequence[float]) -> float | None:
    """The mean of a value of each sample, weighted by how long the sample lasts."""
    total_s = sum(s.lasts_s for s in samples)
    weighted = sum(s.lasts_s * value for s, value in zip(samples, values, strict=True))
    return weighted / total_s if total_s else None


def _tokens_in(records: Iterable[Record], window: tuple[float, float]) -> int:
    """Output tokens that came in a window."""
    return sum(
        tokens
        for r in records
        for at_s, tokens in zip(r.arrivals_s, r.piece_tokens, strict=True)
        if _inside(at_s, window)
    )


def _hit_rate(records: Sequence[Record]) -> float | None:
    told = [r for r in records if r.cached_tokens is not None]
    total = sum(r.input_tokens for r in told)
    return sum(r.cached_tokens or 0 for r in told) / total if total else None


def _count_errors(records: Iterable[Record]) -> dict[str, int]:
    errors: dict[str, int] = {}
    for record in records:
        if record.error is not None:
            errors[record.error] = errors.get(record.error, 0) + 1
    return errors


def _spread_ms(seconds: Iterable[float | None]) -> Spread | None:
    known = [1000 * s for s in seconds if s is not None]
    return Spread.of(known) if known else None


def _inside(at_s: float, window: tuple[float, float]) -> bool:
    return window[0] <= at_s < window[1]
