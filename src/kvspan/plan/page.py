"""A plan as an HTML page with plots. Knows what is shown; how is `report`'s affair."""

from collections.abc import Sequence

from kvspan.plan import show
from kvspan.plan.replay import Simulated
from kvspan.plan.search import Plan
from kvspan.report.page import Heading, Part, Plots, Text, page
from kvspan.report.plots import Line, Plot
from kvspan.report.table import TextTable


def plan_page(plan: Plan, simulated: Sequence[Simulated]) -> str:
    """The page.

    Args:
        plan: what was found.
        simulated: layouts that were simulated; may be none.
    """
    parts: list[Part] = [Text(show.question(plan)), *map(Text, show.sentences(plan))]
    if plan.planned:
        best = plan.planned[0]
        parts += [
            Plots((_front(plan), _by_users(plan))),
            Heading("Each layout at its best number of users"),
            TextTable("", show.LAYOUT_HEADS, show.layout_rows(plan.planned)),
            Heading(f"By users: {best.candidate.layout}"),
            TextTable("", show.POINT_HEADS, show.point_rows(best.points)),
            Heading("Where a step that only decodes goes, in milliseconds"),
            TextTable("", ("part", "ms"), show.parts_rows(best, plan)),
        ]
    if simulated:
        table = TextTable("", show.SIMULATED_HEADS, show.simulated_rows(simulated))
        parts += [Heading("Simulated"), table]
    if plan.refused:
        table = TextTable("", ("layout", "why"), [(r.layout, r.why) for r in plan.refused])
        parts += [Heading("Refused"), table]
    parts.append(Text(f"Hardware: {plan.device.source}."))
    return page(f"{plan.model.name} on {plan.asked.gpus} x {plan.device.name}", parts)


def _front(plan: Plan) -> Plot:
    """The Pareto front over all points."""
    everyone = [point for planned in plan.planned for point in planned.points]
    front = sorted((point.tok_s_user, point.output_tok_s_gpu) for _, point in plan.front)
    return Plot(
        title="Speed for users against throughput",
        x_label="tokens/s for a user",
        y_label="tokens of output/s/GPU",
        lines=(
            Line(
                name="all layouts",
                x=[p.tok_s_user for p in everyone],
                y=[p.output_tok_s_gpu for p in everyone],
                joined=False,
                color=5,
            ),
            Line(name="Pareto front", x=[x for x, _ in front], y=[y for _, y in front]),
        ),
    )


def _by_users(plan: Plan) -> Plot:
    """Throughput by users of the best layouts."""
    return Plot(
        title="Throughput by users",
        x_label="users",
        y_label="tokens of output/s/GPU",
        lines=[
            Line(
                name=p.candidate.layout,
                x=[point.concurrency for point in p.points],
                y=[point.output_tok_s_gpu for point in p.points],
                color=color,
            )
            for color, p in enumerate(show.best_of_each(plan.planned)[:6])
        ],
        log_x=True,
    )
