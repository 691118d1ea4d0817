"""What the time of a step follows from, but for what is in it: a model on ranks, habits of engines."""

from dataclasses import dataclass

from kvspan.config.model import ModelConfig
from kvspan.cost.facts import Device
from kvspan.cost.prefill import FEWEST_BYTES
from kvspan.cost.traffic import SUM_BYTES
from kvspan.cost.weights import WeightDtypes
from kvspan.topology import Topology


@dataclass(frozen=True, slots=True)
class Habits:
    """What engines do in different ways, beside what can be asked of ours.

    Args:
        gather_latent_queries: queries of latent attention are gathered as they ask latents (wider), and
            not as they are projected.
        sum_bytes: of an element of partial results that are summed over ranks.
        prefill_strategy: what travels for cached context (`cost.prefill`).
        teams: whether PCP coordinates share weights out in steps of few rows (`cost.team`).
    """

    gather_latent_queries: bool = False
    sum_bytes: int = SUM_BYTES
    prefill_strategy: str = FEWEST_BYTES
    teams: bool = True


KVSPAN = Habits()
PUBLISHED = Habits(gather_latent_queries=True, sum_bytes=2, prefill_strategy="allgather_kv", teams=False)
"""Of the engine whose figures with DCP are published."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """A model on some ranks: everything about a step but what is in it.

    Args:
        model: sizes.
        device: of each rank.
        topology: a legal layout.
        dtypes: of the weights.
        kv_dtype_bytes: of a cached element.
        exchange: how partial results meet, `a2a` or `ag_rs`.
        replicate_q: whether each rank projects all queries of its DCP group.
        expert_parallel: whether ranks keep whole experts.
    """

    model: ModelConfig
    device: Device
    topology: Topology
    dtypes: WeightDtypes
    kv_dtype_bytes: int
    exchange: str = "a2a"
    replicate_q: bool = False
    expert_parallel: bool = False
    habits: Habits = KVSPAN
