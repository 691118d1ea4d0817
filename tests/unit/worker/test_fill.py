"""Made-up keys and values: what a token gets depends on seed, layer, head and position alone."""

import numpy as np
import pytest
import torch

from kvspan.attention.kv_store import CacheFormat, CacheStore, KvStore, LatentStore
from kvspan.cache.placement import Placed, round_robin
from kvspan.cache.table import RankTable
from kvspan.config.model import ModelConfig, parse_model_config
from kvspan.layout import NO_SLOT, CacheLayout
from kvspan.testing.tiny import TINY
from kvspan.topology import Topology
from kvspan.worker.fill import STEP, Filler, made_up

CPU = torch.device("cpu")
NUM_TOKENS, BLOCKS = 1100, 160
MODELS = ["llama-gqa-9x3", "llama-mqa", "deepseek-v3"]


def stores(config: ModelConfig, num_kv_heads: int, dtype: torch.dtype) -> list[CacheStore]:
    cache = CacheFormat(block_size=8, dtype=dtype, computed=torch.float32, device=CPU)
    if (mla := config.mla) is not None:
        sizes = {"latent_dim": mla.kv_lora_rank, "rotary_dim": mla.rope_dim}
        return [LatentStore(cache, **sizes) for _ in range(config.num_layers)]
    head_dim = config.head_dim
    return [
        KvStore(cache, num_kv_heads=num_kv_heads, head_dim=head_dim) for _ in range(config.num_layers)
    ]


def contents(
    name: str, topology: Topology, *, interleave: int, dtype: torch.dtype
) -> dict[tuple[int, int, int], list[torch.Tensor]]:
    """(position, layer, KV head) -> what each rank that keeps it has there, in all of its tensors."""
    config = parse_model_config(TINY[name], where="tiny")
    layout = CacheLayout(block_size=8, dcp_size=topology.dcp_size, interleave=interleave)
    num_units = layout.num_units(NUM_TOKENS)
    pools = round_robin([BLOCKS] * layout.num_pools, num_units=num_units, placed=Placed())
    next_block = iter(np.random.default_rng(3).permutation(BLOCKS).tolist())
    units = [pool * BLOCKS + next(next_block) for pool in pools]  # in no order
    found: dict[tuple[int, int, int], list[torch.Tensor]] = {}
    for rank in range(topology.world_size):
        heads = topology.kv_heads(rank, config.heads)
        mine = stores(config, heads.size, dtype)
        for store in mine:
            store.allocate(BLOCKS)
        table = RankTable(layout, dcp_rank=topology.dcp_rank(rank), blocks_per_pool=BLOCKS)
        table.append(units)
        filler = Filler(mine, config, kv_heads=heads, block_size=8, dtype=torch.float32, device=CPU)
        filler.fill(table, num_tokens=NUM_TOKENS, seed=9)
        slots = table.slots(0, NUM_TOKENS)
        for position in np.flatnonzero((slots != NO_SLOT) & (np.arange(NUM_TOKENS) % 37 == 0)):
            block, offset = divmod(int(slots[position]), 8)
            for layer, store in enumerate(mine):
                for local, head in enumerate(range(heads.start, heads.stop)):
                    parts = [t[block, local, offset].float() for t in store.tensors]
                    found.setdefault((int(position), layer, head), []).append(torch.cat(parts))
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_every_layout_has_the_same_content(name: str, dtype: torch.dtype) -> None:
    whole = contents(name, Topology(), interleave=8, dtype=dtype)
    for tp, dcp, interleave in ((3, 3, 8), (3, 3, 2), (3, 1, 8), (2, 2, 1)):
        spread = contents(name, Topology(tp_size=tp, dcp_size=dcp), interleave=interleave, dtype=dtype)
        assert whole.keys() == spread.keys()
        for place, copies in spread.items():
            assert all(torch.equal(copy, whole[place][0]) for copy in copies), place


def test_content_is_what_was_drawn_and_differs_everywhere() -> None:
    shape = (2, 3, 16)
    drawn = made_up(np.arange(64), seed=5, shape=shape)
    assert drawn.shape == (64, *shape)
    assert len(np.unique(drawn.reshape(-1, 16), axis=0)) == 64 * 2 * 3
    assert np.array_equal(made_up(np.array([7, 50]), seed=5, shape=shape), drawn[[7, 50]])
    assert not np.array_equal(made_up(np.arange(64), seed=6, shape=shape), drawn)
    assert abs(drawn.astype(float).mean() * STEP) < 0.05
    assert (torch.from_numpy(drawn).bfloat16() * STEP).float().equal(torch.from_numpy(drawn) * STEP)
