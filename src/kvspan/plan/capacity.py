"""What a layout's ranks hold: weights, and tokens in what they leave. Admission's own arithmetic."""

from dataclasses import dataclass

from kvspan.config.sizes import format_bytes
from kvspan.cost.memory import (
    blocks_for_budget,
    blocks_for_tokens,
    capacity_tokens,
    kv_bytes_per_global_token,
    kv_bytes_per_local_token,
)
from kvspan.cost.steptime import StepCost
from kvspan.errors import ConfigError
from kvspan.layout import CacheLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """Of one replica.

    Args:
        weight_bytes: of a rank.
        kv_budget_bytes: of a rank, for its cache; negative if the weights take more than there is.
        kv_bytes_per_token: that a rank stores for a token of a request, in the mean over the ranks that
            share it.
        blocks_per_rank: blocks that fit in the budget.
        tokens: of requests, in the pools of the whole DCP group.
        hit_unit: tokens in which prefixes are found again.
    """

    weight_bytes: int
    kv_budget_bytes: int
    kv_bytes_per_token: float
    blocks_per_rank: int
    tokens: int
    hit_unit: int


def capacity_of(cost: StepCost, layout: CacheLayout, *, fraction: float) -> Capacity:
    """What a deployment holds.

    Args:
        cost: of the deployment.
        layout: how blocks and ranks share a sequence.
        fraction: of each device's memory, for weights and cache.
    """
    on, weights = cost.on, cost.weights.num_bytes
    budget = int(fraction * on.device.memory_bytes) - weights
    local = kv_bytes_per_local_token(on.model, on.topology, kv_dtype_bytes=on.kv_dtype_bytes)
    blocks = blocks_for_budget(budget, block_size=layout.block_size, bytes_per_token=local)
    return Capacity(
        weight_bytes=weights,
        kv_budget_bytes=budget,
        kv_bytes_per_token=kv_bytes_per_global_token(
            on.model, on.topology, kv_dtype_bytes=on.kv_dtype_bytes
        ),
        blocks_per_rank=blocks,
        tokens=capacity_tokens(blocks, layout),
        hit_unit=layout.unit_tokens,
    )


def check_capacity(capacity: Capacity, layout: CacheLayout, *, request_tokens: int) -> None:
    """Refuses what cannot hold its weights and one request.

    Raises:
        ConfigError: by how much it does not fit.
    """
    if capacity.kv_budget_bytes < 0:
        raise ConfigError(
            f"a rank's weights of {format_bytes(capacity.weight_bytes)} are "
            f"{format_bytes(-capacity.kv_budget_bytes)} more than it has room for."
        )
    needed = blocks_for_tokens(request_tokens, layout)
    if needed > capacity.blocks_per_rank:
        block_bytes = layout.block_size * capacity.kv_bytes_per_token * layout.dcp_size
        short = int((needed - capacity.blocks_per_rank) * block_bytes)
        raise ConfigError(
            f"the cache holds {capacity.tokens} tokens and a request has {request_tokens}: a rank is "
            f"{format_bytes(short)} short."
        )
