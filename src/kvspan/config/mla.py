"""Multi-head latent attention as configs write it: DeepSeek-V2, V3 and their descendants."""

import msgspec

from kvspan.config.reader import Reader
from kvspan.config.rope import rope_settings, yarn_mscale


class MlaConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of latent attention: the cache holds one latent a token, which all heads share.

    Args:
        q_lora_rank: elements of the query's latent; None = queries are projected in one step.
        kv_lora_rank: elements of the latent that keys and values are made from.
        nope_dim: elements of a head's key that are made from the latent.
        rope_dim: elements of a key that are rotated; all heads share them.
        value_dim: elements of a head's value.
        score_factor: factor on the scores beside 1 / sqrt(nope_dim + rope_dim).
    """

    q_lora_rank: int | None
    kv_lora_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    score_factor: float


def parse_mla(read: Reader) -> MlaConfig | None:
    """Sizes of latent attention, or None for a model without latents.

    Raises:
        ModelError: a size is missing or cannot be.
    """
    if not read.has("kv_lora_rank"):
        return None
    return MlaConfig(
        q_lora_rank=read.positive("q_lora_rank") if read.has("q_lora_rank") else None,
        kv_lora_rank=read.positive("kv_lora_rank"),
        nope_dim=read.positive("qk_nope_head_dim"),
        rope_dim=read.positive("qk_rope_head_dim"),
        value_dim=read.positive("v_head_dim"),
        score_factor=_score_factor(rope_settings(read)),
    )


def _score_factor(rope: Reader) -> float:
    """YaRN's temperature on queries and on keys, for all their dims: its square on the scores."""
    weight = rope.number("mscale_all_dim", default=0.0)
    return yarn_mscale(rope.number("factor"), weight) ** 2 if weight else 1.0
