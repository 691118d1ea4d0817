"""Snapshots: what is drawn is what the cache holds."""

import msgspec
import pytest

from kvspan.cache.manager import CacheManager
from kvspan.cache.prefix import KeySpace
from kvspan.engine.events import EngineStats
from kvspan.engine.messages import Seen, decode_report, encode
from kvspan.engine.snapshot import CACHED, FREE, MAX_CELLS, look
from kvspan.layout import CacheLayout
from kvspan.request import SamplingParams
from kvspan.sequence import SequenceState


def cache_of(num_blocks: int) -> CacheManager:
    return CacheManager(CacheLayout(block_size=8, dcp_size=2, interleave=8), blocks_per_pool=num_blocks)


def run(cache: CacheManager, request_id: int, num_tokens: int) -> SequenceState:
    space = KeySpace(layout=cache.layout, kv_dtype="float32", model="m")
    tokens = [request_id] * num_tokens
    state = SequenceState(
        request_id=request_id,
        tokens=tokens,
        num_prompt_tokens=num_tokens,
        params=SamplingParams(),
        seed=0,
        keys=space.keys(tokens, cache_salt=""),
    )
    state.allocation = cache.allocate(request_id, state.keys, num_tokens=num_tokens, max_hit_tokens=0)
    cache.register(request_id, num_computed_tokens=num_tokens)
    state.num_computed_tokens = num_tokens
    return state


def test_cells_show_who_holds_what() -> None:
    cache = cache_of(6)
    gone, here = run(cache, 3, 16), run(cache, 4, 40)
    cache.free(3)
    gone.allocation = None
    seen = look(cache, [gone, here])
    cells = [cell for pool in seen.pools for cell in pool.cells]
    assert [cells.count(what) for what in (4, CACHED, FREE)] == [5, 2, 5]
    assert [pool.num_blocks for pool in seen.pools] == [6, 6]
    assert sum(pool.num_used for pool in seen.pools) == 5
    assert sum(pool.num_cached for pool in seen.pools) == 2
    assert [r.running for r in seen.requests] == [False, True]
    assert sum(seen.requests[1].blocks_by_pool) == 5
    assert seen.requests[0].blocks_by_pool == [0, 0]


@pytest.mark.parametrize("num_blocks", [1, MAX_CELLS, MAX_CELLS + 1, 5000])
def test_large_pools_are_drawn_coarser_and_nothing_is_missed(num_blocks: int) -> None:
    cache = cache_of(num_blocks)
    seen = look(cache, [run(cache, 0, 8)])
    for pool in seen.pools:
        assert len(pool.cells) <= MAX_CELLS
        assert len(pool.cells) * pool.blocks_per_cell >= num_blocks
    assert sum(pool.cells.count(0) for pool in seen.pools) == 1


def test_a_snapshot_crosses_processes() -> None:
    cache = cache_of(4)
    seen = Seen(look(cache, [run(cache, 0, 20)]), EngineStats())
    assert decode_report(encode(seen)) == seen
    assert msgspec.json.decode(msgspec.json.encode(seen.snapshot))["pools"][0]["num_blocks"] == 4
