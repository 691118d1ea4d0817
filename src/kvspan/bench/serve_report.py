"""What a replay found, for readers: tables, plots, a CSV of its requests, one page of HTML."""

from collections.abc import Sequence

import numpy as np

from kvspan.bench.figures import Figures
from kvspan.bench.record import Observed, Record, Sample
from kvspan.report.page import Code, Heading, Part, Plots, Text, page
from kvspan.report.plots import Line, Plot
from kvspan.report.table import TextTable, csv_text, number, share
from kvspan.trace.stats import Spread

_BINS = 60  # of a run, in plots over time
_CSV_COLUMNS = (
    "row", "input_tokens", "output_tokens", "cached_tokens", "due_s", "sent_s", "ttft_ms", "tpot_ms",
    "e2e_ms", "finished", "error",
)  # fmt: skip


def latency_table(found: Figures) -> TextTable:
    """TTFT, TPOT, ITL and E2E in milliseconds."""
    of_all = found.latencies
    spreads = (
        ("time to first token (TTFT)", of_all.ttft_ms),
        ("time per output token (TPOT)", of_all.tpot_ms),
        ("between tokens (ITL)", of_all.itl_ms),
        ("whole answer (E2E)", of_all.e2e_ms),
        ("sent late", found.lag_ms),
    )
    rows = [(name, *_spread_cells(spread)) for name, spread in spreads]
    return TextTable("Latencies", ("ms", "mean", "median", "p90", "p99", "longest"), rows)


def summary_table(found: Figures, *, num_ranks: int) -> TextTable:
    """Throughput, and what the cache did."""
    engine, user = found.engine, found.latencies.tokens_per_s_per_user
    steady_s = found.window_s[1] - found.window_s[0]
    per_rank = f"output tokens a second and rank ({num_ranks})"
    rows = [
        ("requests answered", f"{found.num_ok:,}"),
        ("errors / unfinished", f"{found.num_errors:,} / {found.num_unfinished:,}"),
        ("seconds, of them steady", f"{found.duration_s:,.1f}, {steady_s:,.1f}"),
        ("requests a second", number(found.requests_per_s, 2)),
        ("input tokens a second", number(found.input_tokens_per_s)),
        ("output tokens a second", number(found.output_tokens_per_s)),
        (per_rank, number(found.output_tokens_per_s_per_rank)),
        ("tokens a second for a user", number(user)),
        ("requests running, mean", number(engine.running_mean)),
        ("requests running, most", number(engine.running_max, 0)),
        ("KV cache in use, mean", share(engine.kv_used_mean)),
        ("KV cache in use, most", share(engine.kv_used_max)),
        ("prompt tokens found in the cache", share(found.hit_rate)),
        ("preemptions", number(engine.preemptions, 0)),
        ("prefill: share of computed tokens", share(engine.prefill_token_share)),
        ("prefill: share of time", share(engine.prefill_time_share)),
    ]
    return TextTable("In the steady window", ("", ""), rows)


def length_table(found: Figures) -> TextTable:
    """Latencies by length of prompt."""
    rows = [
        (
            name,
            f"{some.num_requests:,}",
            number(some.ttft_ms.p50 if some.ttft_ms else None),
            number(some.tpot_ms.p50 if some.tpot_ms else None),
            number(some.output_tokens_per_s),
        )
        for name, some in found.by_length.items()
    ]
    columns = ("prompt", "requests", "median TTFT, ms", "median TPOT, ms", "output tok/s")
    return TextTable("By length of prompt (before scaling)", columns, rows)


def requests_csv(records: Sequence[Record]) -> str:
    """One line a request."""
    return csv_text(_CSV_COLUMNS, [_csv_row(record) for record in records])


def serve_page(title: str, command: str, found: Figures, observed: Observed, *, num_ranks: int) -> str:
    """The report as one HTML file.

    Args:
        title: what was measured.
        command: that measured it.
        found: its figures.
        observed: what they were made of.
        num_ranks: that computed it.
    """
    parts: list[Part] = [Code(command)]
    if found.interrupted:
        parts.append(Text("The run was interrupted: this is what had been measured by then."))
    parts += [summary_table(found, num_ranks=num_ranks), latency_table(found), length_table(found)]
    if found.errors:
        rows = [(text, str(count)) for text, count in found.errors.items()]
        parts.append(TextTable("Errors", ("", "requests"), rows))
    parts += [Heading("Requests"), Plots(_request_plots(observed.records))]
    parts += [Heading("Over time"), Plots(_time_plots(observed))]
    return page(title, parts)


def _request_plots(records: Sequence[Record]) -> list[Plot]:
    values = (
        ("TTFT", [r.ttft_s for r in records]),
        ("TPOT", [r.tpot_s for r in records]),
        ("E2E", [r.e2e_s for r in records]),
    )
    plots = [
        Plot(
            title=f"{name}: share of requests that were faster",
            x_label="ms",
            y_label="share",
            lines=[_cumulative([1000 * s for s in seconds if s is not None])],
        )
        for name, seconds in values
    ]
    first = [(r.input_tokens, 1000 * r.ttft_s) for r in records if r.ttft_s is not None]
    dots = Line(name="", x=[x for x, _ in first], y=[y for _, y in first], joined=False)
    by_length = Plot(
        title="TTFT by length of prompt", x_label="input tokens", y_label="TTFT, ms", lines=[dots]
    )
    return [*plots, by_length]


def _time_plots(observed: Observed) -> list[Plot]:
    edges = np.linspace(0, max(observed.end_s, 1e-9), _BINS + 1)
    middles = ((edges[1:] + edges[:-1]) / 2).tolist()
    arrivals = [at for r in observed.records for at in r.arrivals_s]
    tokens = [n for r in observed.records for n in r.piece_tokens]
    rate = np.histogram(arrivals, bins=edges, weights=tokens)[0] / (edges[1] - edges[0])
    lines = [Line(name="", x=middles, y=rate.tolist(), marked=False)]
    plots = [_over_time("Output tokens a second", "tokens/s", lines)]
    samples = observed.samples
    if samples:
        running = [float(s.running) for s in samples]
        plots.append(_over_time("Requests running", "requests", [_sampled(samples, running)]))
    if used := [s for s in samples if s.kv_used is not None]:
        shares = [100 * (s.kv_used or 0.0) for s in used]
        plots.append(_over_time("KV cache that requests hold", "%", [_sampled(used, shares)]))
    return plots


def _over_time(title: str, y_label: str, lines: Sequence[Line]) -> Plot:
    return Plot(title=title, x_label="seconds", y_label=y_label, lines=lines)


def _sampled(samples: Sequence[Sample], values: Sequence[float]) -> Line:
    """At most a few hundred points: a page need not hold every step."""
    stride = -(-len(samples) // 400)
    x = [s.start_s for s in samples[::stride]]
    return Line(name="", x=x, y=values[::stride], marked=False)


def _cumulative(values: Sequence[float]) -> Line:
    ordered = sorted(values)
    stride = max(1, len(ordered) // 400)
    shares = [(i + 1) / len(ordered) for i in range(len(ordered))]
    return Line(name="", x=ordered[::stride], y=shares[::stride], marked=False)


def _spread_cells(spread: Spread | None) -> tuple[str, ...]:
    if spread is None:
        return ("-",) * 5
    return tuple(number(v) for v in (spread.mean, spread.p50, spread.p90, spread.p99, spread.max))


def _csv_row(record: Record) -> tuple[object, ...]:
    ms = (
        None if s is None else round(1000 * s, 3) for s in (record.ttft_s, record.tpot_s, record.e2e_s)
    )
    return (
        record.index,
        record.input_tokens,
        record.output_tokens,
        record.cached_tokens,
        round(record.due_s, 6),
        round(record.sent_s, 6),
        *ms,
        int(record.ok),
        record.error,
    )
