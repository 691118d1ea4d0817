"""What a span for each request brings, for readers: tables, the curve, and bars missed or met."""

import statistics
from collections.abc import Callable, Sequence

from kvspan.bench.answered import MOST_TAIL
from kvspan.bench.elastic import CurvePoint, Home, Measured
from kvspan.bench.elastic_traffic import LONG_TOKENS, Traffic
from kvspan.bench.figures import Latencies
from kvspan.bench.rivals import ELASTIC, REPLICAS, STATIC
from kvspan.report.page import Code, Heading, Part, Plots, Text, page
from kvspan.report.plots import Line, Plot
from kvspan.report.table import TextTable, number, share
from kvspan.trace.stats import K, Spread

Who = tuple[str, str]
"""A rival's kind, and its layout."""
_NUM_COLORS = 5
"""That rivals take in turn; the one behind them is the threshold's."""
_HOW = (
    "Replicas: each rank an engine of its own. Static: every request spans the ranks. Elastic: a "
    "request stays on one rank up to the threshold, and spans them beyond it. TPOT is the time of a "
    "decoded token over made-up keys, at the median step; traffic is a trace, by users who ask again "
    "when they are answered, or at a rate. Output tokens a second are of whole answers, over the time "
    "from the first request to the last answer."
)
_CURVE_NOTE = (
    "TPOT: the median step; times replicas: it over theirs, the median of the rounds, and the highest "
    "beside it; exchange: ranks met in attention."
)
_TRAFFIC_NOTE = (
    "tok/s: output of whole answers, until the last one; until last sent: of what came while requests "
    "did; time after it: its share; output refused: share of the output asked for; good req/s: answers "
    "within --ttft and --tpot; left home: requests whose home was full."
)
_WAITING_NOTE = (
    f"TTFT: time to the first token; TPOT: of a token after it; long: {LONG_TOKENS // K}K tokens and "
    "more, before scaling."
)
_STEPS_NOTE = (
    "exchange: ranks met in attention; ms: of the mean step, with one and without; sharing a prompt: "
    "PCP coordinates computed parts of it."
)


def rivals_of(measured: Measured) -> list[Who]:
    """Everybody in order of turns."""
    both = [(kind, home.layout) for home in measured.homes for kind in (STATIC, ELASTIC)]
    return [(REPLICAS, ""), *both]


def called(measured: Measured, who: Who) -> str:
    """A rival's name; its layout is told where there are several."""
    return " ".join(who).strip() if len(measured.homes) > 1 else who[0]


def title_of(measured: Measured) -> str:
    """Layouts and transport."""
    return f"{' | '.join(home.layout for home in measured.homes)} over {measured.comm}"


def best_curve(measured: Measured) -> list[CurvePoint]:
    """The curve, of static rivals only the points of their better exchange."""
    better = {home.layout: home.exchange for home in measured.homes}
    return [p for p in measured.curve if p.rival != STATIC or p.exchange == better[p.layout]]


def curve_plot(measured: Measured) -> Plot:
    """Milliseconds of a token by context, a line a rival."""
    points = best_curve(measured)
    lines = []
    for index, who in enumerate(rivals_of(measured)):
        own = [p for p in points if (p.rival, p.layout) == who]
        xs = [float(p.context) for p in own]
        ys = [p.tpot_ms for p in own]
        lines.append(Line(name=called(measured, who), x=xs, y=ys, color=index % _NUM_COLORS))
    top = max((p.tpot_ms for p in points), default=0.0)
    for home in measured.homes:
        if points and points[0].context <= home.threshold <= points[-1].context:
            lines.append(_threshold_line(called(measured, (ELASTIC, home.layout)), home, top))
    return Plot(
        title=title_of(measured),
        x_label="context, tokens",
        y_label="TPOT, ms",
        lines=lines,
        log_x=True,
    )


def _threshold_line(name: str, home: Home, top: float) -> Line:
    return Line(
        name=f"{name} spans from {home.threshold:,} tokens on",
        x=[float(home.threshold)] * 2,
        y=[0.0, top],
        marked=False,
        dashed=True,
        color=_NUM_COLORS,
    )


def curve_table(measured: Measured) -> TextTable:
    """A row for each context and rival."""
    rows = [
        (
            f"{p.context:,}",
            called(measured, (p.rival, p.layout)) + (f" {p.exchange}" if p.rival == STATIC else ""),
            number(p.tpot_ms, 2),
            number(p.p90_ms, 2),
            number(p.ratio, 3),
            number(p.worst_ratio, 3),
            share(p.exchange_share),
        )
        for p in measured.curve
    ]
    batch = measured.curve[0].batch if measured.curve else 0
    columns = (
        "context", "rival", "TPOT, ms", "p90, ms", "times replicas", "in the worst round",
        "steps with exchange",
    )  # fmt: skip
    title = f"{title_of(measured)}: time of a token (TPOT), {batch} sequences"
    return TextTable(title, columns, rows, _CURVE_NOTE)


def traffic_tables(measured: Measured, trace: str) -> list[TextTable]:
    """Everything about a trace."""
    return [table(measured, trace) for table in (traffic_table, latency_table, steps_table)]


def traffic_table(measured: Measured, trace: str) -> TextTable:
    """What each rival gave, medians of the rounds."""
    rows = [(called(measured, who), *_given(_of(measured, trace, who))) for who in rivals_of(measured)]
    title = f"{title_of(measured)}: {trace} traffic, {measured.cache_tokens:,} tokens of cache a rank"
    columns = (
        "rival", "tok/s", "tok/s until last sent", "time after it", "answered", "refused",
        "output refused", "good req/s", "preempted", "left home",
    )  # fmt: skip
    return TextTable(title, columns, rows, _TRAFFIC_NOTE)


def latency_table(measured: Measured, trace: str) -> TextTable:
    """What users of short and of long prompts waited for, medians of the rounds; of what a trace has."""
    columns = (
        "rival", "prompts", "answers", "TTFT p50, ms", "TTFT p99, ms", "TPOT p50, ms", "TPOT p99, ms",
    )  # fmt: skip
    lengths: dict[str, Callable[[Traffic], Latencies]] = {
        "short": lambda t: t.short,
        "long": lambda t: t.long,
    }
    everybody = [t for t in measured.traffic if t.trace == trace]
    rows = [
        (called(measured, who), name, *_waits([of(t) for t in _of(measured, trace, who)]))
        for who in rivals_of(measured)
        for name, of in lengths.items()
        if any(of(t).num_requests for t in everybody)
    ]
    return TextTable(f"{title_of(measured)}: {trace} traffic, waiting", columns, rows, _WAITING_NOTE)


def steps_table(measured: Measured, trace: str) -> TextTable:
    """What steps each rival's engines made, medians of the rounds."""
    columns = ("rival", "steps", "with exchange", "ms with", "ms without", "sharing a prompt")
    rows = [(called(measured, who), *_stepped(_of(measured, trace, who))) for who in rivals_of(measured)]
    return TextTable(f"{title_of(measured)}: {trace} traffic, steps", columns, rows, _STEPS_NOTE)


def verdicts(measured: Measured) -> list[str]:
    """Of each trace: who refused what, elastic beside its rivals, what stands in the way of trust."""
    said = []
    for trace in dict.fromkeys(t.trace for t in measured.traffic):
        refusals = _refusals(measured, trace)
        counted = "counting only what was answered, " if refusals else ""
        said += refusals
        said += [_verdict(measured, trace, home, counted) for home in measured.homes]
        said += _tails(measured, trace)
    return said


def _verdict(measured: Measured, trace: str, home: Home, counted: str) -> str:
    """Elastic of a layout beside static of it and replicas, and what its share of exchanges allows."""
    mine, static = (ELASTIC, home.layout), (STATIC, home.layout)
    rounds = _of(measured, trace, mine)
    sentence = (
        f"{trace} traffic over {measured.comm}: {counted}{called(measured, mine)} gives "
        f"{speed_ratio(measured, trace, mine, static):.2f} times the output of static and "
        f"{speed_ratio(measured, trace, mine, (REPLICAS, '')):.2f} times that of replicas; "
        f"{statistics.median(t.exchange_share for t in rounds):.1%} of its steps had an exchange"
    )
    if bounds := [t.bound for t in rounds if t.bound is not None]:
        sentence += (
            f", so that by leaving exchanges out it can be {statistics.median(bounds):.2f} times as "
            "fast as with one in every step, and not more"
        )
    if (waits := long_tpot_ratio(measured, trace, home.layout)) is not None:
        sentence += f"; the p99 TPOT of its long requests is {waits:.2f} times that of static"
    return sentence + "."


def _refusals(measured: Measured, trace: str) -> list[str]:
    """What each rival refused, a sentence for each that did."""
    said = []
    for who in rivals_of(measured):
        rounds = _of(measured, trace, who)
        if refused := statistics.median(t.found.num_errors for t in rounds):
            lost = statistics.median(t.refused_share for t in rounds)
            requests = "1 request" if refused == 1 else f"{refused:.0f} requests"
            why = ", which no rank holds alone" if who[0] == REPLICAS else ""
            said.append(
                f"{trace} traffic over {measured.comm}: {called(measured, who)} refused {requests}, "
                f"{lost:.1%} of the output asked for{why}."
            )
    return said


def _tails(measured: Measured, trace: str) -> list[str]:
    """A warning, if answers after the last request make up much of what was measured."""
    tails = {
        called(measured, who): statistics.median(
            t.answered.tail_share for t in _of(measured, trace, who)
        )
        for who in rivals_of(measured)
    }
    name, longest = max(tails.items(), key=lambda tail: tail[1])
    if longest <= MOST_TAIL:
        return []
    return [
        f"Warning: {longest:.0%} of the time of {name} ({trace} traffic) came after the last request "
        f"was sent, more than {MOST_TAIL:.0%}: raise --rows, or tok/s tells of few answers."
    ]


def long_tpot_ratio(measured: Measured, trace: str, layout: str) -> float | None:
    """The p99 TPOT of elastic's long requests over static's; None = a round had none."""
    p99s = [
        [t.long.tpot_ms.p99 for t in _of(measured, trace, (kind, layout)) if t.long.tpot_ms]
        for kind in (ELASTIC, STATIC)
    ]
    if not all(p99s):
        return None
    mine, its = map(statistics.median, p99s)
    return mine / its


def speed_ratio(measured: Measured, trace: str, who: Who, rival: Who) -> float:
    """Output tokens a second of one over another's, the median of the rounds' ratios."""
    pairs = zip(_of(measured, trace, who), _of(measured, trace, rival), strict=True)
    return statistics.median(
        mine.answered.output_tokens_per_s / max(its.answered.output_tokens_per_s, 1e-9)
        for mine, its in pairs
    )


def elastic_page(title: str, command: str, measured: Sequence[Measured]) -> str:
    """The report as one HTML file."""
    parts: list[Part] = [Code(command), Text(_HOW)]
    curves = [each for each in measured if each.curve]
    parts.append(Plots([curve_plot(each) for each in curves]))
    parts += [Text(sentence) for each in measured for sentence in verdicts(each)]
    for each in measured:
        parts.append(Heading(title_of(each)))
        parts += [Text(f"{home.layout}, threshold: {home.why}") for home in each.homes]
        parts += [curve_table(each)] if each.curve else []
        for name in dict.fromkeys(t.trace for t in each.traffic):
            parts += traffic_tables(each, name)
    return page(title, parts)


def _of(measured: Measured, trace: str, who: Who) -> list[Traffic]:
    """Rounds in order."""
    some = [t for t in measured.traffic if (t.trace, t.rival, t.layout) == (trace, *who)]
    return sorted(some, key=lambda t: t.round)


def _given(rounds: Sequence[Traffic]) -> tuple[str, ...]:
    median = _medians(rounds)
    return (
        number(median(lambda t: t.answered.output_tokens_per_s)),
        number(median(lambda t: t.found.output_tokens_per_s)),
        share(median(lambda t: t.answered.tail_share)),
        number(median(lambda t: t.found.num_ok), 0),
        number(median(lambda t: t.found.num_errors), 0),
        share(median(lambda t: t.refused_share)),
        number(median(lambda t: t.answered.good_requests_per_s), 2),
        number(median(lambda t: t.found.engine.preemptions), 0),
        number(median(lambda t: t.spills), 0),
    )


def _stepped(rounds: Sequence[Traffic]) -> tuple[str, ...]:
    median = _medians(rounds)
    return (
        number(median(lambda t: t.num_steps), 0),
        share(median(lambda t: t.exchange_share)),
        number(median(lambda t: t.exchange_step_ms)),
        number(median(lambda t: t.plain_step_ms)),
        share(median(lambda t: t.shared_steps / max(t.num_steps, 1))),
    )


def _medians(
    rounds: Sequence[Traffic],
) -> Callable[[Callable[[Traffic], float | None]], float | None]:
    """Asks for the median of a figure over the rounds."""
    return lambda of: _median([of(each) for each in rounds])


def _waits(rounds: Sequence[Latencies]) -> tuple[str, ...]:
    def median(of: Callable[[Latencies], Spread | None], at: Callable[[Spread], float]) -> float | None:
        return _median([None if (spread := of(each)) is None else at(spread) for each in rounds])

    return (
        number(_median([each.num_requests for each in rounds]), 0),
        number(median(lambda each: each.ttft_ms, lambda spread: spread.p50), 0),
        number(median(lambda each: each.ttft_ms, lambda spread: spread.p99), 0),
        number(median(lambda each: each.tpot_ms, lambda spread: spread.p50)),
        number(median(lambda each: each.tpot_ms, lambda spread: spread.p99)),
    )


def _median(values: Sequence[float | None]) -> float | None:
    """Of those that are there."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None
