"""What an engine looks like at a moment, for somebody who watches it: its blocks and its requests.

Large pools are drawn coarser, so that a look costs the same at any size. Knows no tensors, text or HTTP.
"""

from collections.abc import Iterable

import msgspec
import numpy as np

from kvspan.cache.manager import CacheManager
from kvspan.sequence import SequenceState

FREE, CACHED = -2, -1
"""What a cell shows besides the number of a request: nobody has it; nobody has it, but its content may
be hit."""

MAX_CELLS = 1024
"""Of a pool: as many as an eye tells apart."""

MAX_REQUESTS = 256
"""That a look tells of, the oldest first."""


class PoolView(msgspec.Struct, frozen=True):
    """A pool of blocks: of one rank, or of the whole DCP group if the interleave is under a block.

    Args:
        num_blocks: in all.
        num_used: that requests hold.
        num_cached: that nobody holds and a prefix may hit.
        blocks_per_cell: blocks that a cell stands for.
        cells: FREE, CACHED, or the number of a request that holds a block of it.
    """

    num_blocks: int
    num_used: int
    num_cached: int
    blocks_per_cell: int
    cells: list[int]


class RequestView(msgspec.Struct, frozen=True):
    """A request that runs or waits.

    Args:
        request_id: the engine's number for it.
        num_prompt_tokens: of its prompt.
        num_output_tokens: sampled so far.
        num_computed_tokens: whose keys are in the cache.
        num_cached_tokens: of its prompt that were found there.
        running: whether it holds blocks.
        num_preemptions: times that it began again.
        blocks_by_pool: blocks that it holds in each pool.
        is_local: whether one home has all of them, and attends for it alone.
    """

    request_id: int
    num_prompt_tokens: int
    num_output_tokens: int
    num_computed_tokens: int
    num_cached_tokens: int
    running: bool
    num_preemptions: int
    blocks_by_pool: list[int]
    is_local: bool


class Snapshot(msgspec.Struct, frozen=True):
    """All of an engine.

    Args:
        pools: of blocks.
        requests: the oldest first, `MAX_REQUESTS` at the most.
        num_requests: of them in all.
    """

    pools: list[PoolView]
    requests: list[RequestView]
    num_requests: int


def look(cache: CacheManager, states: Iterable[SequenceState]) -> Snapshot:
    """Takes a snapshot.

    Args:
        cache: the blocks.
        states: the requests, the oldest first.
    """
    everyone = list(states)
    num_pools, size = cache.layout.num_pools, cache.blocks_per_pool
    units = np.full(num_pools * size, FREE, dtype=np.int64)  # [U]
    units[list(cache.known_units)] = CACHED
    requests: list[RequestView] = []
    for state in everyone:
        held = np.asarray(state.allocation.units if state.allocation else [], dtype=np.int64)
        units[held] = state.request_id
        if len(requests) < MAX_REQUESTS:
            requests.append(_request(state, np.bincount(held // size, minlength=num_pools).tolist()))
    pools = [_pool(part) for part in units.reshape(num_pools, size)]
    return Snapshot(pools, requests, len(everyone))


def _request(state: SequenceState, blocks_by_pool: list[int]) -> RequestView:
    return RequestView(
        request_id=state.request_id,
        num_prompt_tokens=state.num_prompt_tokens,
        num_output_tokens=len(state.tokens) - state.num_prompt_tokens,
        num_computed_tokens=state.num_computed_tokens,
        num_cached_tokens=state.num_cached_tokens or 0,
        running=state.allocation is not None,
        num_preemptions=state.num_preemptions,
        blocks_by_pool=blocks_by_pool,
        is_local=state.allocation is not None and state.allocation.home is not None,
    )


def _pool(units: "np.ndarray[tuple[int], np.dtype[np.int64]]") -> PoolView:
    """A pool's blocks in cells; of several blocks the one that tells most is shown."""
    size = len(units)
    per_cell = -(-size // MAX_CELLS)
    padded = np.full(-(-size // per_cell) * per_cell, FREE, dtype=np.int64)
    padded[:size] = units
    return PoolView(
        num_blocks=size,
        num_used=int((units >= 0).sum()),
        num_cached=int((units == CACHED).sum()),
        blocks_per_cell=per_cell,
        cells=padded.reshape(-1, per_cell).max(axis=1).tolist(),
    )
