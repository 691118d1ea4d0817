"""What a sweep found, for readers: a table, a CSV, and Pareto fronts overall and by length of prompt."""

from collections.abc import Sequence

from kvspan.bench.sweep import Point, pareto_front
from kvspan.report.page import Code, Heading, Part, Plots, Text, page
from kvspan.report.plots import Line, Plot
from kvspan.report.table import TextTable, csv_text, number, share
from kvspan.trace.stats import length_buckets

_X_LABEL, _Y_LABEL = "output tokens/s for a user (1 / median TPOT)", "output tokens/s per rank"
_HOW = (
    "Each point is a closed loop of so many users (the number beside it) on an engine of its own. To "
    "the right is faster for a user, upwards is more for the machine. Throughput is that of the steady "
    "window, in which all users are at work and as many requests have ended as there are users."
)
_COLUMNS = (
    "layout", "users", "KV tokens", "tok/s/rank", "tok/s/user", "TTFT p50, ms", "TPOT p50, ms",
    "running", "KV used", "hits", "preemptions", "prefill time", "errors", "front",
)  # fmt: skip


def sweep_table(points: Sequence[Point], title: str = "") -> TextTable:
    """One row a point; the last column marks those that no other one beats."""
    front = set(pareto_front([(p.user_speed, p.rank_speed) for p in points]))
    rows = [(*_cells(point), "*" if i in front else "") for i, point in enumerate(points)]
    return TextTable(title, _COLUMNS, rows)


def sweep_csv(points: Sequence[Point]) -> str:
    """One line a point, figures as they are."""
    columns = ("layout", "users", "num_ranks", "budget_bytes", "capacity_tokens", "output_tokens_per_s",
               "output_tokens_per_s_per_rank", "tokens_per_s_per_user", "running_mean", "running_max",
               "kv_used_mean", "hit_rate", "preemptions", "prefill_token_share", "prefill_time_share",
               "num_ok", "num_errors")  # fmt: skip
    return csv_text(columns, [_csv_row(point) for point in points])


def pareto_plot(points: Sequence[Point], *, bucket: str | None = None, title: str = "") -> Plot:
    """Tokens a second and rank against tokens a second for a user, a line a layout.

    Args:
        points: of a sweep.
        bucket: only requests with prompts of this length; None = all.
        title: what is written above it; empty = the bucket's name.
    """
    names = list(dict.fromkeys(point.layout for point in points))
    lines = []
    for color, name in enumerate(names):
        speeds = [(_speeds(p, bucket), str(p.users)) for p in points if p.layout == name]
        known = [(xy, label) for xy, label in speeds if xy is not None]
        lines.append(
            Line(
                name=name,
                x=[x for (x, _), _ in known],
                y=[y for (_, y), _ in known],
                labels=[label for _, label in known],
                color=color,
            )
        )
    shown = title or (f"Prompts of {bucket}" if bucket else "All requests")
    return Plot(title=shown, x_label=_X_LABEL, y_label=_Y_LABEL, lines=lines)


def users_plots(points: Sequence[Point]) -> list[Plot]:
    """Throughput, requests running, hits and preemptions by number of users."""
    measures = (
        ("Throughput", "output tokens/s per rank", [p.rank_speed for p in points]),
        ("Requests running", "requests, mean", [p.found.engine.running_mean or 0.0 for p in points]),
        ("Prompt tokens found in the cache", "%", [100 * (p.found.hit_rate or 0.0) for p in points]),
        ("Preemptions", "in the run", [float(p.found.engine.preemptions or 0) for p in points]),
    )
    return [_by_users(points, title, label, values) for title, label, values in measures]


def sweep_page(title: str, command: str, points: Sequence[Point]) -> str:
    """The report as one HTML file."""
    parts: list[Part] = [Code(command), Text(_HOW), Plots([pareto_plot(points), *users_plots(points)])]
    parts += [sweep_table(points), Heading("By length of prompt (before scaling)")]
    found = {name for point in points for name in point.found.by_length}
    buckets = [bucket.name for bucket in length_buckets() if bucket.name in found]
    parts.append(Plots([pareto_plot(points, bucket=name) for name in buckets]))
    return page(title, parts)


def _by_users(points: Sequence[Point], title: str, label: str, values: Sequence[float]) -> Plot:
    names = list(dict.fromkeys(point.layout for point in points))
    lines = []
    for color, name in enumerate(names):
        own = [(float(p.users), v) for p, v in zip(points, values, strict=True) if p.layout == name]
        lines.append(Line(name=name, x=[x for x, _ in own], y=[y for _, y in own], color=color))
    return Plot(title=title, x_label="users", y_label=label, lines=lines, log_x=True)


def _speeds(point: Point, bucket: str | None) -> tuple[float, float] | None:
    if bucket is None:
        return point.user_speed, point.rank_speed
    some = point.found.by_length.get(bucket)
    if some is None or some.tokens_per_s_per_user is None:
        return None
    return some.tokens_per_s_per_user, some.output_tokens_per_s / point.num_ranks


def _cells(point: Point) -> tuple[str, ...]:
    found, of_all, engine = point.found, point.found.latencies, point.found.engine
    return (
        point.layout,
        str(point.users),
        f"{point.capacity_tokens:,}",
        number(point.rank_speed),
        number(point.user_speed),
        number(of_all.ttft_ms.p50 if of_all.ttft_ms else None, 0),
        number(of_all.tpot_ms.p50 if of_all.tpot_ms else None),
        number(engine.running_mean),
        share(engine.kv_used_mean),
        share(found.hit_rate),
        number(engine.preemptions, 0),
        share(engine.prefill_time_share),
        str(found.num_errors),
    )


def _csv_row(point: Point) -> tuple[object, ...]:
    found, engine = point.found, point.found.engine
    return (
        point.layout,
        point.users,
        point.num_ranks,
        point.budget_bytes,
        point.capacity_tokens,
        found.output_tokens_per_s,
        point.rank_speed,
        point.user_speed,
        engine.running_mean,
        engine.running_max,
        engine.kv_used_mean,
        found.hit_rate,
        engine.preemptions,
        engine.prefill_token_share,
        engine.prefill_time_share,
        found.num_ok,
        found.num_errors,
    )
