"""Bytes, blocks and tokens of the KV cache. Pure arithmetic, shared by admission, start-up and planning.

Knows what ranks report; measures nothing and allocates nothing.

A **local** token is one that a rank keeps; with W ranks to a sequence it keeps every W-th of the
sequence's **global** tokens, so a pool of n tokens on each rank is n * W tokens of requests.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from kvspan.config.model import ModelConfig
from kvspan.config.resolved import Resolved
from kvspan.config.sizes import enough_bytes, fitting_bytes, format_bytes
from kvspan.errors import ConfigError
from kvspan.layout import CacheLayout
from kvspan.step import RankReport
from kvspan.topology import Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class CachePlan:
    """The KV cache that ranks are told to allocate.

    Args:
        blocks_per_rank: blocks of each rank's pool.
        tokens_per_rank: local tokens that they hold.
        tokens_total: tokens of requests that the whole DCP group holds.
        hit_unit: tokens in which prefixes are found again.
        bytes_per_rank: bytes of a rank's pool.
        why: where the size comes from, a sentence.
    """

    blocks_per_rank: int
    tokens_per_rank: int
    tokens_total: int
    hit_unit: int
    bytes_per_rank: int
    why: str


def kv_bytes_per_token(model: ModelConfig, *, kv_dtype_bytes: int) -> int:
    """Bytes of one token's keys and values in the whole model, one copy.

    Args:
        model: sizes.
        kv_dtype_bytes: bytes of one cached element.
    """
    return _kv_bytes(model, num_kv_heads=model.num_kv_heads, kv_dtype_bytes=kv_dtype_bytes)


def kv_bytes_per_local_token(model: ModelConfig, topology: Topology, *, kv_dtype_bytes: int) -> int:
    """Bytes that a rank stores for one token of its own shard, over all layers.

    Args:
        model: sizes.
        topology: a legal layout; in one, all ranks keep equally many KV heads.
        kv_dtype_bytes: bytes of one cached element.
    """
    num_kv_heads = topology.kv_heads(0, model.heads).size
    return _kv_bytes(model, num_kv_heads=num_kv_heads, kv_dtype_bytes=kv_dtype_bytes)


def kv_bytes_per_global_token(model: ModelConfig, topology: Topology, *, kv_dtype_bytes: int) -> float:
    """Bytes that a rank stores for one token of a request, on average over its W ranks.

    Args:
        model: sizes.
        topology: a legal layout.
        kv_dtype_bytes: bytes of one cached element.
    """
    local = kv_bytes_per_local_token(model, topology, kv_dtype_bytes=kv_dtype_bytes)
    return local / topology.dcp_size


def blocks_for_budget(budget_bytes: int, *, block_size: int, bytes_per_token: int) -> int:
    """Blocks that fit in a budget.

    Args:
        budget_bytes: of one rank.
        block_size: B.
        bytes_per_token: bytes of one local token.
    """
    return max(budget_bytes, 0) // (block_size * bytes_per_token)


def capacity_tokens(blocks_per_rank: int, layout: CacheLayout) -> int:
    """Tokens of requests that the pools of a whole DCP group hold: blocks * B * W."""
    return blocks_per_rank * layout.block_size * layout.dcp_size


def blocks_for_tokens(num_tokens: int, layout: CacheLayout, *, num_requests: int = 1) -> int:
    """Blocks of each rank without which some requests cannot be held at once.

    Args:
        num_tokens: tokens of each request.
        layout: how they are placed. Units go to any pool with room, so only their sum counts.
        num_requests: how many.
    """
    return -(-num_requests * layout.num_units(num_tokens) // layout.num_pools)


def plan_cache(reports: Sequence[RankReport], resolved: Resolved) -> CachePlan:
    """Sizes the KV cache, the same number of blocks on every rank.

    A fraction of the free memory is cut down to what `max_num_seqs` requests of `max_model_len` can
    use; an amount that somebody asked for is taken as it is, since a prefix cache can use more.

    Args:
        reports: of every rank, after it has loaded its weights.
        resolved: what will run.

    Raises:
        ConfigError: a rank has less memory than was asked for, or one request of `max_model_len`
            does not fit in the pools of the whole DCP group.
    """
    layout = resolved.cache_layout
    memory = [_RankMemory.of(report, reports, resolved) for report in reports]
    _check_room(memory, resolved)
    fitting = min(
        blocks_for_budget(m.budget_bytes, block_size=layout.block_size, bytes_per_token=m.token_bytes)
        for m in memory
    )
    usable = fitting if resolved.kv_budget_bytes is not None else _usable_blocks(resolved)
    blocks = min(fitting, usable)
    block_bytes = layout.block_size * max(m.token_bytes for m in memory)
    _check_one_request_fits(blocks, block_bytes, min(m.room_bytes for m in memory), resolved)
    return CachePlan(
        blocks_per_rank=blocks,
        tokens_per_rank=blocks * layout.block_size,
        tokens_total=capacity_tokens(blocks, layout),
        hit_unit=layout.unit_tokens,
        bytes_per_rank=blocks * block_bytes,
        why=_why(memory, resolved, is_capped=usable < fitting),
    )


def _kv_bytes(model: ModelConfig, *, num_kv_heads: int, kv_dtype_bytes: int) -> int:
    return model.num_layers * num_kv_heads * model.head_dims.cached * kv_dtype_bytes


@dataclass(frozen=True, slots=True)
class _RankMemory:
    """A rank's part of the memory.

    Args:
        room_bytes: that the cache could take, if it took all.
        budget_bytes: that it is to take.
        token_bytes: of one local token.
    """

    room_bytes: int
    budget_bytes: int
    token_bytes: int

    @classmethod
    def of(cls, report: RankReport, all_reports: Sequence[RankReport], resolved: Resolved) -> Self:
        """On a GPU the weights count towards the fraction; a host's memory is shared by its ranks."""
        fraction = resolved.kv_fraction
        if resolved.device == "cuda":
            room = report.free_bytes
            device_bytes = report.free_bytes + report.weight_bytes
            budget = max(int(fraction * device_bytes) - report.weight_bytes, 0)
        else:
            room = min(r.free_bytes for r in all_reports) // len(all_reports)
            budget = int(fraction * room)
        asked = resolved.kv_budget_bytes
        return cls(room, budget if asked is None else asked, report.kv_bytes_per_token)


def _check_room(memory: Sequence[_RankMemory], resolved: Resolved) -> None:
    """Refuses an amount that was asked for and is not there."""
    asked, room = resolved.kv_budget_bytes, min(m.room_bytes for m in memory)
    if asked is not None and asked > room:
        raise ConfigError(
            f"--kv-cache-memory asks for {format_bytes(asked)} on each of {len(memory)} ranks, but a "
            f"rank has {format_bytes(room)} free: lower it to at most {fitting_bytes(room)}."
        )


def _usable_blocks(resolved: Resolved) -> int:
    """Blocks of a rank that running requests can use at the most."""
    return blocks_for_tokens(
        resolved.max_model_len, resolved.cache_layout, num_requests=resolved.max_num_seqs
    )


def _check_one_request_fits(blocks: int, block_bytes: int, room_bytes: int, resolved: Resolved) -> None:
    """Admission counts the pools of the whole group, and so does this."""
    layout = resolved.cache_layout
    needed = blocks_for_tokens(resolved.max_model_len, layout)
    if needed <= blocks:
        return
    tokens, needed_bytes = capacity_tokens(blocks, layout), needed * block_bytes
    ways_out = [
        f"raise --kv-cache-memory to at least {enough_bytes(needed_bytes)}"
        if needed_bytes <= room_bytes
        else "spread sequences over more ranks with --decode-context-parallel-size"
    ]
    if tokens:
        ways_out.append(f"lower --max-model-len to at most {tokens}")
    raise ConfigError(
        f"The KV cache of {layout.dcp_size} x {format_bytes(blocks * block_bytes)} holds {tokens} "
        f"tokens, but a request of --max-model-len {resolved.max_model_len} needs "
        f"{format_bytes(needed_bytes)} on each rank: {', or '.join(ways_out)}."
    )


def _why(memory: Sequence[_RankMemory], resolved: Resolved, *, is_capped: bool) -> str:
    """Where the size comes from."""
    budget = format_bytes(min(m.budget_bytes for m in memory))
    room = format_bytes(min(m.room_bytes for m in memory))
    if resolved.kv_budget_bytes is not None:
        return f"--kv-cache-memory gives each rank {budget}."
    if is_capped:
        return (
            f"{resolved.max_num_seqs} requests of {resolved.max_model_len} tokens can use no more; "
            f"each rank could have {budget}."
        )
    if resolved.device == "cuda":
        return f"{resolved.kv_fraction} of each GPU, less the weights, is {budget}; {room} are free."
    return f"{resolved.kv_fraction} of the {room} of free memory that is each rank's part is {budget}."
