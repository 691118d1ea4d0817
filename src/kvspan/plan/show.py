"""A plan in words, rows and plain values, for whoever prints it. Knows no console and no HTML."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from kvspan.config.sizes import format_bytes
from kvspan.cost.work import decode_work
from kvspan.plan.command import Commands
from kvspan.plan.held import Held, held_weights
from kvspan.plan.replay import Simulated
from kvspan.plan.search import Plan, Planned, Point

LAYOUT_HEADS = (
    "layout",
    "weights",
    "KV B/token",
    "KV tokens",
    "requests",
    "hit unit",
    "users",
    "TTFT",
    "TPOT",
    "hits",
    "out tok/s/GPU",
    "all tok/s/GPU",
)
POINT_HEADS = (
    "users",
    "running/replica",
    "TTFT",
    "TPOT",
    "hits",
    "out tok/s/GPU",
    "all tok/s/GPU",
    "tok/s/user",
)
SIMULATED_HEADS = (
    "layout",
    "users",
    "TTFT",
    "p90",
    "TPOT",
    "hits",
    "KV held",
    "full",
    "out tok/s/GPU",
    "new+out tok/s/GPU",
    "all tok/s/GPU",
    "preempted",
)


def question(plan: Plan) -> str:
    """What was asked, in a line."""
    asked, load = plan.asked, plan.load
    shared = f", {load.shared_tokens} shared by all" if load.shared_tokens else ""
    kept = f", {load.kept_tokens} of the turn before" if load.kept_tokens else ""
    return (
        f"{plan.model.name}, weights {weights_name(plan)}, KV {asked.kv_cache_dtype}, on {asked.gpus} x "
        f"{plan.device.name}: prompts of {load.input_tokens} tokens{shared}{kept}, "
        f"{load.output_tokens} of output."
    )


def weights_name(plan: Plan) -> str:
    """The dtypes of the weights."""
    d = plan.dtypes
    if d.linear == d.experts:
        return d.linear
    return f"{d.experts} experts and {d.linear}"


def sentences(plan: Plan) -> list[str]:
    """What holds for all layouts, and which is the best."""
    said = [
        f"One copy of the KV cache takes {plan.kv_bytes_per_token:,} bytes a token: "
        f"{format_bytes(plan.kv_bytes_per_token * plan.load.input_tokens)} for a prompt."
    ]
    if not plan.device.verified:
        said.append(f"The figures of {plan.device.name} are not verified ({plan.device.source}).")
    held = held_weights(plan)
    on_paper = [] if held is None else [_held(plan, held)]
    if not plan.planned:
        ways = ", or ".join(plan.ways_out) or "none of fp8 or nvfp4 weights and 32 times the GPUs"
        return [*said, f"Nothing fits. What would: {ways}.", *on_paper]
    best = plan.planned[0]
    said.append(_best(plan, best))
    alone = tp_alone(plan.planned)
    if alone is not None and alone is not best and alone.best is not None and best.best is not None:
        gain = best.best.output_tok_s_gpu / alone.best.output_tok_s_gpu
        capacity = _tokens(best) / max(_tokens(alone), 1)
        said.append(
            f"Against {alone.candidate.layout}: {gain:.2f} times the tokens a second, and "
            f"{capacity:.2f} times the tokens in the cache."
        )
    return [*said, *on_paper, *_run(plan, best)]


def layout_rows(planned: Sequence[Planned]) -> list[list[str]]:
    """A row of `LAYOUT_HEADS` for each."""
    return [_layout_row(p) for p in planned]


def best_of_each(planned: Sequence[Planned]) -> list[Planned]:
    """Of each layout the best choice of interleave, query mode and exchange."""
    found: dict[str, Planned] = {}
    for each in planned:
        found.setdefault(each.candidate.layout, each)
    return list(found.values())


def tp_alone(planned: Sequence[Planned]) -> Planned | None:
    """The best layout without context parallelism of either kind."""
    topologies = ((p, p.candidate.topology) for p in planned)
    return next((p for p, t in topologies if t.dcp_size == t.pcp_size == 1), None)


def point_rows(points: Sequence[Point]) -> list[list[str]]:
    """A row of `POINT_HEADS` for each."""
    return [
        [f"{p.concurrency:,}", f"{p.steady.running:,}", *_times(p), f"{p.tok_s_user:,.1f}"]
        for p in points
    ]


def simulated_rows(simulated: Sequence[Simulated]) -> list[list[str]]:
    """A row of `SIMULATED_HEADS` for each."""
    return [
        [
            s.layout,
            "trace" if s.concurrency is None else f"{s.concurrency:,}",
            seconds(s.ttft_s),
            seconds(s.ttft_p90_s),
            seconds(s.tpot_s),
            f"{s.hit_rate:.0%}",
            f"{s.usage:.0%}",
            f"{s.waiting:.0%}",
            f"{s.output_tok_s_gpu:,.0f}",
            f"{s.computed_tok_s_gpu + s.output_tok_s_gpu:,.0f}",
            f"{s.total_tok_s_gpu:,.0f}",
            f"{s.preemptions:,}",
        ]
        for s in simulated
    ]


def parts_rows(planned: Planned, plan: Plan) -> list[list[str]]:
    """Where a decode step of the best point goes: part, milliseconds."""
    if planned.best is None:
        return []
    context = plan.load.input_tokens + plan.load.output_tokens / 2
    parts = planned.cost.parts_s(decode_work(context, batch=planned.best.steady.running))
    return [[name, f"{s * 1e3:.2f}"] for name, s in parts.items() if s]


def seconds(value: float) -> str:
    """`85 ms`, `2.4 s`."""
    return f"{value * 1e3:.3g} ms" if value < 1 else f"{value:,.3g} s"


def as_json(plan: Plan, simulated: Sequence[Simulated]) -> dict[str, Any]:
    """All of it, as values of JSON; units are in the names."""
    commands, held = Commands(plan), held_weights(plan)
    return {
        "model": plan.model.name,
        "hardware": plan.device.name,
        "hardware_source": plan.device.source,
        "gpus": plan.asked.gpus,
        "weights": weights_name(plan),
        "weights_on_paper": held is not None,
        "weights_held": None if held is None else {"dtype": "bf16", **asdict(held)},
        "kv_cache_dtype": plan.asked.kv_cache_dtype,
        "input_tokens": plan.load.input_tokens,
        "output_tokens": plan.load.output_tokens,
        "shared_tokens": plan.load.shared_tokens,
        "kept_tokens": plan.load.kept_tokens,
        "kv_bytes_per_token": plan.kv_bytes_per_token,
        "layouts": [_json_layout(p, plan, commands) for p in plan.planned],
        "front": [
            {"layout": p.candidate.layout, "command": _command(p, plan, commands), **_json_point(point)}
            for p, point in plan.front
        ],
        "refused": [{"layout": r.layout, "why": r.why} for r in plan.refused],
        "ways_out": list(plan.ways_out),
        "simulated": [asdict(s) for s in simulated],
    }


def _command(p: Planned, plan: Plan, commands: Commands) -> str | None:
    return commands.of(p) if plan.hosts_of_replica(p) == 1 else None


def _json_layout(p: Planned, plan: Plan, commands: Commands) -> dict[str, Any]:
    t, c = p.candidate.topology, p.capacity
    return {
        "layout": p.candidate.layout,
        "command": _command(p, plan, commands),
        "hosts_per_replica": plan.hosts_of_replica(p),
        "tp_size": t.tp_size,
        "dcp_size": t.dcp_size,
        "pcp_size": t.pcp_size,
        "replicas": p.candidate.replicas,
        "interleave": p.candidate.interleave,
        "replicate_q": p.candidate.replicate_q,
        "exchange": p.candidate.exchange,
        "weight_bytes_per_gpu": c.weight_bytes,
        "kv_budget_bytes_per_gpu": c.kv_budget_bytes,
        "kv_bytes_per_token_per_gpu": c.kv_bytes_per_token,
        "kv_capacity_tokens": _tokens(p),
        "kv_capacity_requests": p.room,
        "hit_unit_tokens": c.hit_unit,
        "best": None if p.best is None else _json_point(p.best),
        "points": [_json_point(point) for point in p.points],
    }


def _json_point(p: Point) -> dict[str, Any]:
    return {
        "concurrency": p.concurrency,
        "running_per_replica": p.steady.running,
        "hit_rate": p.steady.hit_rate,
        "ttft_s": p.steady.ttft_s,
        "tpot_s": p.steady.tpot_s,
        "output_tok_s_gpu": p.output_tok_s_gpu,
        "total_tok_s_gpu": p.total_tok_s_gpu,
        "meets": p.meets,
    }


def _run(plan: Plan, best: Planned) -> list[str]:
    """How to run the best; of layouts of one machine, if its ranks are on several."""
    if best.best is None:
        return []
    if plan.hosts_of_replica(best) == 1:
        return [*_of_hosts(plan, best), Commands(plan).of(best)]
    said = (
        f"kvspan cannot start this: {best.candidate.topology.world_size} GPUs are "
        f"{plan.hosts_of_replica(best)} machines of {plan.device.host_ranks} {plan.device.name}, "
        "and its ranks are processes of one machine."
    )
    can = next((p for p in plan.planned if p.best and plan.hosts_of_replica(p) == 1), None)
    if can is None or can.best is None:
        return [f"{said} No layout of one machine fits."]
    figures = (
        f"{can.candidate.layout}, {can.best.output_tok_s_gpu:,.0f} tokens of output a second and GPU."
    )
    return [f"{said} The best that it can: {figures}", *_of_hosts(plan, can), Commands(plan).of(can)]


def _of_hosts(plan: Plan, planned: Planned) -> list[str]:
    """What introduces a command."""
    full, rest = divmod(planned.candidate.replicas, plan.replicas_of_host(planned))
    where = f" on each of {full} machines" if full > 1 else " on one machine" if full and rest else ""
    more = f", with -dp {rest} on one more" if full and rest else ""
    balanced = ", behind a balancer" if full + bool(rest) > 1 else ""
    held = held_weights(plan)
    if held is not None and not held.fits:
        return ["It would be this, if kvspan could hold such weights:"]
    apart = "" if held is None else ", but for its weights,"
    return [f"What was planned{apart} is what this runs{where}{more}{balanced}:"]


def _held(plan: Plan, held: Held) -> str:
    """That the engine holds other weights than were planned, in a sentence with numbers."""
    reads = "reads no nvfp4 checkpoints, and holds" if plan.dtypes.experts == "nvfp4" else "holds"
    least = "no number of GPUs that was tried" if held.gpus is None else f"{held.gpus} GPUs at least"
    if held.gpus is not None and held.gpus > plan.device.host_ranks:
        least += f" in one machine, where this hardware has {plan.device.host_ranks}"
    size = ""
    if held.weight_bytes is not None:
        enough = "fit" if held.fits else "do not fit"
        size = f" {format_bytes(held.weight_bytes)} a rank of this layout, which {enough};"
    return (
        f"{weights_name(plan)} weights are on paper: kvspan {reads} weights as bf16:{size} {least} "
        "(--weights-dtype bf16 plans what it runs)."
    )


def _best(plan: Plan, best: Planned) -> str:
    asked, point = plan.asked, best.best
    limits = [
        f"{name} {seconds(limit)}"
        for name, limit in (("TTFT", asked.ttft), ("TPOT", asked.tpot))
        if limit is not None
    ]
    if point is None:
        return f"No layout keeps {' and '.join(limits)} for any number of users that was tried."
    within = f" within {' and '.join(limits)}" if limits else ""
    return (
        f"Best by {asked.goal}{within}: {best.candidate.layout}, {point.output_tok_s_gpu:,.0f} tokens "
        f"of output a second and GPU for {point.concurrency:,} users."
    )


def _layout_row(p: Planned) -> list[str]:
    head = [
        p.candidate.layout,
        format_bytes(p.capacity.weight_bytes),
        f"{p.capacity.kv_bytes_per_token:,.0f}",
        f"{_tokens(p):,}",
        f"{p.room:,}",
        f"{p.capacity.hit_unit}",
    ]
    if p.best is None:
        return [*head, "none meets", *[""] * 5]
    return [*head, f"{p.best.concurrency:,}", *_times(p.best)]


def _times(p: Point) -> list[str]:
    s = p.steady
    return [
        seconds(s.ttft_s),
        seconds(s.tpot_s),
        f"{s.hit_rate:.0%}",
        f"{p.output_tok_s_gpu:,.0f}",
        f"{p.total_tok_s_gpu:,.0f}",
    ]


def _tokens(p: Planned) -> int:
    return p.capacity.tokens * p.candidate.replicas
