"""A plan as an HTML page with plots. Knows what is shown; how is `report`'s affair."""

from collections.abc import Sequence

from kvspan.plan import show
from kvspan.plan.replay import Simulated
from kvspan.plan.search import Plan
from kvspan.report.page import Page
from kvspan.report.plot import Series, plot_svg


def plan_page(plan: Plan, simulated: Sequence[Simulated]) -> str:
    """The page.

    Args:
        plan: what was found.
        simulated: layouts that were simulated; may be none.
    """
    page = Page(f"{plan.model.name} on {plan.asked.gpus} x {plan.device.name}")
    page.paragraph(show.question(plan))
    for sentence in show.sentences(plan):
        page.paragraph(sentence)
    if plan.planned:
        _plots(page, plan)
        page.heading("Each layout at its best number of users")
        page.table(show.LAYOUT_HEADS, show.layout_rows(plan.planned))
        best = plan.planned[0]
        page.heading(f"By users: {best.candidate.layout}")
        page.table(show.POINT_HEADS, show.point_rows(best.points))
        page.heading("Where a step that only decodes goes, in milliseconds")
        page.table(("part", "ms"), show.parts_rows(best, plan))
    if simulated:
        page.heading("Simulated")
        page.table(show.SIMULATED_HEADS, show.simulated_rows(simulated))
    if plan.refused:
        page.heading("Refused")
        page.table(("layout", "why"), [(r.layout, r.why) for r in plan.refused])
    page.paragraph(f"Hardware: {plan.device.source}.")
    return page.html()


def _plots(page: Page, plan: Plan) -> None:
    """The Pareto front over all points, and throughput by users of the best layouts."""
    shown = show.best_of_each(plan.planned)[:6]
    everyone = [point for planned in plan.planned for point in planned.points]
    front = sorted((point.tok_s_user, point.output_tok_s_gpu) for _, point in plan.front)
    page.plot(
        plot_svg(
            [
                Series(
                    "all layouts",
                    [p.tok_s_user for p in everyone],
                    [p.output_tok_s_gpu for p in everyone],
                    line=False,
                ),
                Series("Pareto front", [x for x, _ in front], [y for _, y in front]),
            ],
            title="Speed for users against throughput",
            x_label="tokens/s for a user",
            y_label="tokens of output/s/GPU",
        )
    )
    page.plot(
        plot_svg(
            [
                Series(
                    p.candidate.layout,
                    [point.concurrency for point in p.points],
                    [point.output_tok_s_gpu for point in p.points],
                )
                for p in shown
            ],
            title="Throughput by users",
            x_label="users",
            y_label="tokens of output/s/GPU",
            log_x=True,
        )
    )
