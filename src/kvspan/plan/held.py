"""Weights as kvspan itself would hold them, where a plan has others.

Quantised ones are decoded as they are loaded (docs/models.md). Knows no printing.
"""

from dataclasses import dataclass

from kvspan.cost.weights import WeightDtypes, rank_weights
from kvspan.plan.search import Plan, fits
from kvspan.topology import Topology

HELD = ("bf16", "fp32")
"""Weights that stay as they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What the engine would need where the plan counts smaller weights.

    Args:
        weight_bytes: of a rank of the best layout, in bf16; None = there is none.
        fits: whether they leave room for a request on the GPUs that were asked about.
        gpus: the fewest that hold them and a request; None = none that was tried.
    """

    weight_bytes: int | None
    fits: bool
    gpus: int | None


def held_weights(plan: Plan) -> Held | None:
    """Weights of a plan as kvspan holds them; None where they are those of the plan."""
    if {plan.dtypes.linear, plan.dtypes.experts} <= set(HELD):
        return None
    fewest = _fewest_gpus(plan)
    best = plan.planned[0].candidate if plan.planned else None
    topology = None if best is None else best.topology
    return Held(
        weight_bytes=None if best is None else _bytes(plan, best.topology, replicate_q=best.replicate_q),
        fits=topology is not None and _fits(plan, topology.world_size),
        gpus=fewest,
    )


def _fewest_gpus(plan: Plan) -> int | None:
    """GPUs of the smallest replica that holds the weights and a request."""
    room = plan.asked.gpu_memory_utilization * plan.device.memory_bytes
    least = max(int(_bytes(plan, Topology(), replicate_q=False) // room), 1)
    return next((gpus for gpus in range(least, 4 * least + 8) if _fits(plan, gpus)), None)


def _fits(plan: Plan, gpus: int) -> bool:
    return fits(plan.asked, plan.model, plan.device, WeightDtypes(), plan.load, gpus)


def _bytes(plan: Plan, topology: Topology, *, replicate_q: bool) -> int:
    return rank_weights(
        plan.model.config,
        topology,
        replicate_q=replicate_q,
        dtypes=WeightDtypes(),
        expert_parallel=plan.asked.enable_expert_parallel,
    ).num_bytes
