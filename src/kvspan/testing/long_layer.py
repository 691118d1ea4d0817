"""One layer's latent attention over a made-up context of any length, spread over ranks, and in float64.

The ranks are threads with workers as they serve: their stores, kernels and exchange. The reference reads
the same keys in a stream, a few thousand at a time, and knows neither blocks nor ranks.

Legend: n keys, H query heads, L kv_lora_rank, P rope_dim, N nope_dim, V value_dim.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvspan.cache.placement import Placed, round_robin
from kvspan.comm.local import LocalWorld
from kvspan.config.mla import MlaConfig
from kvspan.config.model import ModelConfig
from kvspan.config.resolved import Resolved
from kvspan.layers.rotary import Rotary, Rotation
from kvspan.loading.resolve import resolve
from kvspan.models.deepseek import LATENT_EPS
from kvspan.request import SamplingParams
from kvspan.step import Fill, NewRequest, Row, Step, pack_tokens
from kvspan.testing.ranks import run_ranks
from kvspan.topology import Span
from kvspan.worker.fill import STEP, made_up
from kvspan.worker.worker import Worker, torch_dtype

Doubles = NDArray[np.float64]

SHARPNESS = 8.0
"""Factor on the queries: a few hundred keys get most of the weight, so that none is lost unnoticed."""
_KEYS_AT_ONCE = 4096
_LAYER = "model.layers.0.self_attn."
_NORM = "layers.0.attention.query.norm.weight"


def spread_outputs(
    resolved: Resolved, x: Tensor, *, num_keys: int, seed: int, timeout_s: float = 60.0
) -> list[Tensor]:
    """The layer's output for one new token, by all ranks, and without each one's shard.

    Args:
        resolved: a model with latent attention, of one layer, with dummy weights.
        x: [hidden_size], the layer's input.
        num_keys: n, tokens before the new one.
        seed: of their latents.
        timeout_s: a time guard.

    Returns:
        1 + W times [hidden_size]: of all shards, then without that of rank 0, 1, ...
    """
    size = resolved.topology.world_size
    return run_ranks(
        size, lambda world: _rank_outputs(world, resolved, x, num_keys, seed), timeout_s=timeout_s
    )[0]


@torch.inference_mode()
def _rank_outputs(
    world: LocalWorld, resolved: Resolved, x: Tensor, num_keys: int, seed: int
) -> list[Tensor]:
    torch.set_num_threads(resolved.num_threads)
    layout, model_config = resolved.cache_layout, resolved.model_config
    num_blocks = -(-layout.num_units(num_keys + 1) // layout.num_pools)
    worker = Worker(resolved, world)
    worker.load()
    worker.model.parameters_by_name()[_NORM].mul_(SHARPNESS)
    worker.allocate_cache(num_blocks)
    units = _units(resolved, num_blocks, num_keys + 1)
    worker.fill(Fill(units, num_keys, seed))
    _, batch = worker.prepare(_new_token(num_keys, units))
    rotation = _rotation(model_config, num_keys)
    attention = dict(worker.model.named_modules())["layers.0.attention"]
    spread, local = batch.asking
    unseen = replace(spread, keys=replace(spread.keys, last=np.zeros_like(spread.keys.last)))
    nothing = replace(batch, asking=(unseen, local))
    given = x[None].to(torch_dtype(resolved.dtype))
    outputs = [
        attention(given, rotation, nothing if world.rank == lost else batch)[0].clone()
        for lost in (None, *range(world.size))
    ]
    worker.close()
    return outputs


def _units(resolved: Resolved, num_blocks: int, num_tokens: int) -> tuple[int, ...]:
    """Round the pools, the blocks of each from its last one on."""
    layout = resolved.cache_layout
    num_units = layout.num_units(num_tokens)
    pools = round_robin([num_blocks] * layout.num_pools, num_units=num_units, placed=Placed())
    left = [num_blocks] * layout.num_pools
    units = []
    for pool in pools:
        left[pool] -= 1
        units.append(pool * num_blocks + left[pool])
    return tuple(units)


def _new_token(num_keys: int, units: tuple[int, ...]) -> Step:
    """A step of one row: the token at position `num_keys`."""
    tokens = pack_tokens([0] * (num_keys + 1))
    new = NewRequest(0, tokens, num_keys + 1, SamplingParams(), 0)
    row = Row(0, num_keys, 1, sample=True, new_units=units)
    return Step(0, (new,), (row,), ())


def _rotation(config: ModelConfig, position: int) -> Rotation:
    rotary = Rotary(config.rope, head_dim=config.head_dims.rotary, device=torch.device("cpu"))
    return rotary.at(torch.tensor([position]))


def streamed_output(resolved: Resolved, x: Tensor, *, num_keys: int, seed: int) -> Doubles:
    """The same of all keys, in float64 and in one place.

    Args:
        resolved: as for `spread_outputs`.
        x: likewise.
        num_keys: likewise.
        seed: likewise.

    Returns:
        [hidden_size].
    """
    config = resolved.model_config
    assert config.mla is not None
    mla = config.mla
    weights, given = _weights(resolved), x.double().numpy()
    rotation = _rotation(config, num_keys)
    latent = _normed(weights["q_a_proj"] @ given, weights["q_a_layernorm"] * SHARPNESS)
    query = (weights["q_b_proj"] @ latent).reshape(config.num_heads, -1)
    plain, turning = query[:, : mla.nope_dim], query[:, mla.nope_dim :]
    up = weights["kv_b_proj"].reshape(config.num_heads, mla.nope_dim + mla.value_dim, -1)
    absorbed = np.einsum("hn,hnl->hl", plain, up[:, : mla.nope_dim])
    asking = np.concatenate([absorbed, _turned(turning, rotation)], axis=1)  # [H, L + P]
    keys = _keys(config, _own_key(weights, mla, given, rotation), num_keys, seed)
    latents = _attend(asking * config.softmax_scale, keys, mla.kv_lora_rank)
    values = np.einsum("hl,hvl->hv", latents, up[:, mla.nope_dim :])
    output: Doubles = weights["o_proj"] @ values.reshape(-1)
    return output


def _weights(resolved: Resolved) -> Mapping[str, Doubles]:
    """The layer's dummy weights as ranks have them, which is rounded."""
    config, mla = resolved.model_config, resolved.model_config.mla
    assert mla is not None
    assert mla.q_lora_rank is not None
    heads, hidden, lora = config.num_heads, config.hidden_size, mla.kv_lora_rank
    shapes: dict[str, tuple[int, ...]] = {
        "q_a_proj": (mla.q_lora_rank, hidden),
        "q_a_layernorm": (mla.q_lora_rank,),
        "q_b_proj": (heads * config.head_dim, mla.q_lora_rank),
        "kv_a_proj_with_mqa": (lora + mla.rope_dim, hidden),
        "kv_a_layernorm": (lora,),
        "kv_b_proj": (heads * (mla.nope_dim + mla.value_dim), lora),
        "o_proj": (hidden, heads * mla.value_dim),
    }
    checkpoint = resolve(resolved.model, "dummy", seed=resolved.seed)
    names = {f"{_LAYER}{name}.weight": shape for name, shape in shapes.items()}
    dtype = torch_dtype(resolved.dtype)
    read = [t.read([Span(0, size) for size in t.shape]).to(dtype) for t in checkpoint.tensors(names)]
    return {name: t.double().numpy() for name, t in zip(shapes, read, strict=True)}


def _normed(x: Doubles, weight: Doubles) -> Doubles:
    normed: Doubles = x / np.sqrt(np.mean(x * x) + LATENT_EPS) * weight
    return normed


def _turned(x: Doubles, rotation: Rotation) -> Doubles:
    """Rotary embedding of [..., P]."""
    paired = np.concatenate([x[..., ::2], x[..., 1::2]], axis=-1) if rotation.interleaved else x
    a, b = np.split(paired, 2, axis=-1)
    cos, sin = (t.double().numpy()[0, 0] for t in (rotation.cos, rotation.sin))
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def _own_key(weights: Mapping[str, Doubles], mla: MlaConfig, x: Doubles, rotation: Rotation) -> Doubles:
    """[L + P]: what the new token itself adds to the cache."""
    down = weights["kv_a_proj_with_mqa"] @ x
    latent = _normed(down[: mla.kv_lora_rank], weights["kv_a_layernorm"])
    return np.concatenate([latent, _turned(down[mla.kv_lora_rank :], rotation)])


def _keys(config: ModelConfig, own: Doubles, num_keys: int, seed: int) -> Iterator[Doubles]:
    """[some, L + P] at a time: all that was made up, then the new token's."""
    shape = (config.num_layers, config.num_kv_heads, config.head_dims.cached)
    for start in range(0, num_keys, _KEYS_AT_ONCE):
        positions = np.arange(start, min(start + _KEYS_AT_ONCE, num_keys))
        yield made_up(positions, seed=seed, shape=shape)[:, 0, 0].astype(np.float64) * STEP
    yield own[None]


def _attend(query: Doubles, keys: Iterator[Doubles], value_dim: int) -> Doubles:
    """[H, L]: softmax over a stream of keys, whose first columns are the values."""
    highest = np.full(len(query), -np.inf)
    total, summed = np.zeros(len(query)), np.zeros((len(query), value_dim))
    for some in keys:
        scores = query @ some.T  # [H, some]
        before, highest = highest, np.maximum(highest, scores.max(axis=1))
        weights, shrink = np.exp(scores - highest[:, None]), np.exp(before - highest)
        total = total * shrink + weights.sum(axis=1)
        summed = summed * shrink[:, None] + weights @ some[:, :value_dim]
    attended: Doubles = summed / total[:, None]
    return attended
