"""What a span for each request brings, for readers: tables, the curve, and bars missed or met."""

import statistics
from collections.abc import Callable, Sequence

from kvspan.bench.elastic import CurvePoint, Measured
from kvspan.bench.elastic_traffic import Traffic
from kvspan.bench.rivals import ELASTIC, REPLICAS, STATIC
from kvspan.report.page import Code, Heading, Part, Plots, Text, page
from kvspan.report.plots import Line, Plot
from kvspan.report.table import TextTable, number, share
from kvspan.trace.stats import Spread

_COLORS = {REPLICAS: 0, STATIC: 1, ELASTIC: 2}
_HOW = (
    "Replicas: each rank an engine of its own. Static: every request spans the ranks. Elastic: a "
    "request stays on one rank up to the threshold, and spans them beyond it. TPOT is the time of a "
    "decoded token over made-up keys, at the median step; traffic is a trace, by users who ask again "
    "when they are answered, or at a rate."
)


def best_curve(measured: Measured) -> list[CurvePoint]:
    """The curve, of the static rival only the points of its better exchange."""
    return [p for p in measured.curve if p.rival != STATIC or p.exchange == measured.exchange]


def curve_plot(measured: Measured) -> Plot:
    """Milliseconds of a token by context, a line a rival."""
    points = best_curve(measured)
    lines = []
    for rival, color in _COLORS.items():
        own = [p for p in points if p.rival == rival]
        xs = [float(p.context) for p in own]
        lines.append(Line(name=rival, x=xs, y=[p.tpot_ms for p in own], color=color))
    title = f"{measured.layout} over {measured.comm}"
    top = max((p.tpot_ms for p in points), default=0.0)
    threshold = Line(
        name=f"elastic spans from {measured.threshold:,} tokens on",
        x=[float(measured.threshold)] * 2,
        y=[0.0, top],
        marked=False,
        dashed=True,
        color=5,
    )
    within = bool(points) and points[0].context <= measured.threshold <= points[-1].context
    return Plot(
        title=title,
        x_label="context, tokens",
        y_label="TPOT, ms",
        lines=[*lines, threshold] if within else lines,
        log_x=True,
    )


def curve_table(measured: Measured) -> TextTable:
    """A row for each context and rival."""
    rows = [
        (
            f"{p.context:,}",
            f"{p.rival} {p.exchange}" if p.rival == STATIC else p.rival,
            number(p.tpot_ms, 2),
            number(p.p90_ms, 2),
            number(p.ratio, 3),
            number(p.worst_ratio, 3),
            share(p.exchange_share),
        )
        for p in measured.curve
    ]
    batch = measured.curve[0].batch if measured.curve else 0
    title = f"{measured.layout} over {measured.comm}: TPOT, {batch} sequences"
    columns = ("context", "rival", "TPOT, ms", "p90", "/ replicas", "worst", "steps with exchange")
    return TextTable(title, columns, rows)


def traffic_table(measured: Measured, trace: str) -> TextTable:
    """A row for each rival, medians of the rounds."""
    rows = [_cells(_of(measured, trace, rival)) for rival in _COLORS]
    title = (
        f"{measured.layout} over {measured.comm}: {trace} traffic, "
        f"{measured.cache_tokens:,} tokens of cache a rank"
    )
    columns = (
        "rival", "tok/s", "served", "refused", "preempted", "spilled", "TTFT p50, ms", "TPOT p50, ms",
        "TPOT p99, long", "steps", "with exchange", "prompt shared",
    )  # fmt: skip
    return TextTable(title, columns, rows)


def verdicts(measured: Measured) -> list[str]:
    """Elastic beside each rival in a sentence a trace; with what the share of exchanges allows."""
    said = []
    for trace in dict.fromkeys(t.trace for t in measured.traffic):
        ratios = {rival: speed_ratio(measured, trace, rival) for rival in (STATIC, REPLICAS)}
        rounds = _of(measured, trace, ELASTIC)
        exchanged = statistics.median(t.exchange_share for t in rounds)
        sentence = (
            f"{trace} traffic over {measured.comm}: elastic gives {ratios[STATIC]:.2f} times the output "
            f"of static and {ratios[REPLICAS]:.2f} times that of replicas; {exchanged:.1%} of its steps "
            "had an exchange"
        )
        bounds = [t.bound for t in rounds if t.bound is not None]
        if bounds:
            sentence += (
                f", which makes its mean step at most {statistics.median(bounds):.2f} times as fast as "
                "if all had one"
            )
        waits = long_tpot_ratio(measured, trace)
        replicas = _of(measured, trace, REPLICAS)
        if refused := statistics.median(t.found.num_errors for t in replicas):
            lost = statistics.median(t.refused_share for t in replicas)
            sentence += (
                f"; replicas refused {refused:.0f} requests, {lost:.1%} of the output asked for, which "
                "no rank holds alone"
            )
        if waits is not None:
            sentence += f"; the p99 TPOT of its long requests is {waits:.2f} times that of static"
        said.append(sentence + ".")
    return said


def long_tpot_ratio(measured: Measured, trace: str) -> float | None:
    """The p99 TPOT of elastic's long requests over static's; None = a round had none."""
    p99s = [
        [each.long_tpot_ms.p99 for each in _of(measured, trace, rival) if each.long_tpot_ms]
        for rival in (ELASTIC, STATIC)
    ]
    if not all(p99s):
        return None
    mine, its = map(statistics.median, p99s)
    return mine / its


def speed_ratio(measured: Measured, trace: str, rival: str) -> float:
    """Output tokens a second of elastic over a rival's, the median of the rounds' ratios."""
    pairs = zip(_of(measured, trace, ELASTIC), _of(measured, trace, rival), strict=True)
    return statistics.median(
        mine.found.output_tokens_per_s / max(its.found.output_tokens_per_s, 1e-9) for mine, its in pairs
    )


def elastic_page(title: str, command: str, measured: Sequence[Measured]) -> str:
    """The report as one HTML file."""
    parts: list[Part] = [Code(command), Text(_HOW)]
    curves = [each for each in measured if each.curve]
    parts.append(Plots([curve_plot(each) for each in curves]))
    parts += [Text(sentence) for each in measured for sentence in verdicts(each)]
    for each in measured:
        parts += [Heading(f"{each.layout} over {each.comm}"), Text(f"Threshold: {each.why}")]
        parts += [curve_table(each)] if each.curve else []
        parts += [traffic_table(each, name) for name in dict.fromkeys(t.trace for t in each.traffic)]
    return page(title, parts)


def _of(measured: Measured, trace: str, rival: str) -> list[Traffic]:
    """Rounds in order."""
    some = [t for t in measured.traffic if (t.trace, t.rival) == (trace, rival)]
    return sorted(some, key=lambda t: t.round)


def _cells(rounds: Sequence[Traffic]) -> tuple[str, ...]:
    def median(of: Callable[[Traffic], float | None]) -> float | None:
        known = [value for each in rounds if (value := of(each)) is not None]
        return statistics.median(known) if known else None

    return (
        rounds[0].rival,
        number(median(lambda t: t.found.output_tokens_per_s)),
        number(median(lambda t: t.found.num_ok), 0),
        number(median(lambda t: t.found.num_errors), 0),
        number(median(lambda t: t.found.engine.preemptions), 0),
        number(median(lambda t: t.spills), 0),
        number(median(lambda t: _p50(t.found.latencies.ttft_ms)), 0),
        number(median(lambda t: _p50(t.found.latencies.tpot_ms))),
        number(median(lambda t: None if t.long_tpot_ms is None else t.long_tpot_ms.p99)),
        number(median(lambda t: t.num_steps), 0),
        share(median(lambda t: t.exchange_share)),
        share(median(lambda t: t.shared_steps / max(t.num_steps, 1))),
    )


def _p50(spread: Spread | None) -> float | None:
    return None if spread is None else spread.p50
