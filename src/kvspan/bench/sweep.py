"""One model, one trace, one KV budget of a rank: layouts by number of users, each point an engine's own.

Layouts take turns at each number of users, so that a machine that slows down slows all of them. A point
is written down as soon as it is measured, and a sweep that is begun again measures what is not there.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import msgspec

from kvspan.bench.figures import Figures, figures
from kvspan.bench.offline import Told, replay_offline
from kvspan.bench.schedule import ClosedLoop
from kvspan.config.engine import EngineConfig
from kvspan.engine.build import make_executor, resolve_engine
from kvspan.engine.core import EngineCore
from kvspan.errors import ConfigError
from kvspan.trace.row import Trace


@dataclass(frozen=True, slots=True)
class Layout:
    """What is compared.

    Args:
        name: for tables and plots.
        config: all options of the engine.
    """

    name: str
    config: EngineConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepPlan:
    """What is measured.

    Args:
        layouts: what is compared.
        users: of the closed loops, in order.
        trace: the rows.
        scale: what the trace's lengths were divided by.
        duration_s: of a point; longer ones are ended.
        duration_per_user_s: more for each user, since more users take longer to get under way.
        seed: of prompts.
    """

    layouts: Sequence[Layout]
    users: Sequence[int]
    trace: Trace
    scale: int = 1
    duration_s: float = 60.0
    duration_per_user_s: float = 0.0
    seed: int = 0

    def stop_s(self, users: int) -> float:
        """Seconds after which a point of so many users is ended."""
        return self.duration_s + users * self.duration_per_user_s


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """A layout with so many users.

    Args:
        key: of everything that decides it: options, trace, users, duration.
        layout: name of the layout.
        users: of the closed loop.
        num_ranks: that computed it.
        budget_bytes: of a rank's KV cache.
        capacity_tokens: tokens of requests that the KV cache of all ranks holds.
        found: the figures.
    """

    key: str
    layout: str
    users: int
    num_ranks: int
    budget_bytes: int
    capacity_tokens: int
    found: Figures

    @property
    def user_speed(self) -> float:
        """Tokens a second for a user; 0 = nobody got two."""
        return self.found.latencies.tokens_per_s_per_user or 0.0

    @property
    def rank_speed(self) -> float:
        """Output tokens a second and rank."""
        return self.found.output_tokens_per_s_per_rank


def run_sweep(
    plan: SweepPlan,
    path: Path,
    *,
    begun: Callable[[str, int], Told] = lambda *_: lambda *_: None,
) -> list[Point]:
    """Measures what a file of points does not hold yet.

    Args:
        plan: what is measured.
        path: of JSON lines, one a point; it is made if it is not there.
        begun: called with a layout's name and its users before each point; gives what is told of steps.

    Returns:
        All points of the plan that there are, in its order; fewer if a Ctrl-C ended one.

    Raises:
        ConfigError: the file holds something else, or a layout cannot run.
    """
    known = read_points(path)
    for turn, users in enumerate(plan.users):
        order = plan.layouts if turn % 2 == 0 else plan.layouts[::-1]
        for layout in order:
            key = point_key(plan, layout, users)
            if key in known:
                continue
            point = _measure(plan, layout, users, key, begun(layout.name, users))
            if point.found.interrupted:
                return _of_plan(plan, known)
            known[key] = point
            with path.open("ab") as file:
                file.write(msgspec.json.encode(point) + b"\n")
    return _of_plan(plan, known)


def read_points(path: Path) -> dict[str, Point]:
    """The points of a file by their keys; none if it is not there. A line that was cut off is left out.

    Raises:
        ConfigError: it cannot be read, or holds something else.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ConfigError(f"The points {path} cannot be read: {error.strerror}.") from None
    whole, _, cut = content.rpartition(b"\n")
    if cut:
        path.write_bytes(whole + b"\n" if whole else b"")
    try:
        points = [msgspec.json.decode(line, type=Point) for line in whole.splitlines()]
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path} holds no points of a sweep ({error}): choose another file.") from None
    return {point.key: point for point in points}


def point_key(plan: SweepPlan, layout: Layout, users: int) -> str:
    """Tells one point from every other: 16 hex digits of all that decides it."""
    what = (
        vars(layout.config),
        users,
        plan.scale,
        plan.stop_s(users),
        plan.seed,
        plan.trace.block_tokens,
    )
    digest = blake2b(msgspec.json.encode(what), digest_size=8)
    digest.update(msgspec.json.encode(plan.trace.rows))
    return digest.hexdigest()


def pareto_front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Which points no other one beats: at least as good in both, better in one.

    Args:
        points: (x, y), more being better.

    Returns:
        Indices in order of x, of equal points the first.
    """
    front: list[int] = []
    best_y = float("-inf")
    for index in sorted(range(len(points)), key=lambda i: (-points[i][0], -points[i][1], i)):
        if points[index][1] > best_y:
            best_y = points[index][1]
            front.append(index)
    return front[::-1]


def _measure(plan: SweepPlan, layout: Layout, users: int, key: str, told: Told) -> Point:
    resolved, _ = resolve_engine(layout.config)
    core = EngineCore(resolved, make_executor(resolved))
    try:
        observed = replay_offline(
            core,
            plan.trace,
            ClosedLoop(plan.trace, users=users),
            users=users,
            seed=plan.seed,
            stop_s=plan.stop_s(users),
            told=told,
        )
    finally:
        core.shutdown()
    num_ranks = resolved.topology.world_size
    return Point(
        key=key,
        layout=layout.name,
        users=users,
        num_ranks=num_ranks,
        budget_bytes=core.plan.bytes_per_rank,
        capacity_tokens=core.plan.tokens_total,
        found=figures(observed, num_ranks=num_ranks, scale=plan.scale),
    )


def _of_plan(plan: SweepPlan, known: dict[str, Point]) -> list[Point]:
    keys = [point_key(plan, layout, users) for layout in plan.layouts for users in plan.users]
    return [known[key] for key in keys if key in known]
