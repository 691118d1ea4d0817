"""From how many latents on ranks that need the same keys and values make them together. Knows rates.

PCP coordinates attend for the same heads. Each makes keys and values of all latents that come to it, or
of its share of them, and gathers what the others make. A token saves a rank, of h own heads,

    (1 - 1/P) * h * (N + V) * (2 L / operations a second - bytes of an element / bytes a second)

with L kv_lora_rank, N nope_dim and V value_dim: a product of L terms against an element that moves, so
that sharing pays where a machine does fewer than about L operations in the time of a byte. A core does
about 40 while it takes a byte out of shared memory, a GPU 2,300 while one comes over NVLink.

Decided once, from sizes and rates alone, so that ranks decide alike.
"""

import math

from kvspan.config.model import ModelConfig
from kvspan.cost.choice import Choice
from kvspan.cost.latents import NEVER
from kvspan.cost.pace import Pace
from kvspan.topology import Topology, cuts, touched_heads


def least_tokens_together(
    model: ModelConfig, topology: Topology, pace: Pace, *, dtype_bytes: int
) -> int:
    """Latents of which it takes as long to gather shares of keys and values as to make them all.

    Args:
        model: sizes.
        topology: a legal layout.
        pace: of its ranks.
        dtype_bytes: of an element of what is made.

    Returns:
        A number of tokens; `NEVER` where nothing is made, or by nobody twice, or sooner than moved.
    """
    p, mla = topology.pcp_size, model.mla
    if mla is None or p == 1:
        return NEVER
    element_s = 2 * mla.kv_lora_rank / pace.flops - dtype_bytes / pace.bytes_s
    token_s = (1 - 1 / p) * made_elements(model, topology) * element_s
    return max(math.ceil(pace.gather_s / token_s), 1) if token_s > 0 else NEVER


def made_elements(model: ModelConfig, topology: Topology) -> int:
    """Elements that are made of a latent for a rank's own heads, its rotated part not counted."""
    mla = model.mla
    if mla is None:
        return 0
    columns = cuts(
        topology.query_heads(0, model.heads).size * mla.value_dim, parts=topology.tp_ranks_per_dcp
    )
    return touched_heads(columns[0], mla.value_dim).size * (mla.nope_dim + mla.value_dim)


def choose_together(
    model: ModelConfig, topology: Topology, pace: Pace, *, dtype_bytes: int
) -> Choice[int]:
    """Latents from which on PCP coordinates make keys and values of them together, and why.

    Args:
        model: sizes.
        topology: a legal layout.
        pace: of its ranks.
        dtype_bytes: of an element of what is made.
    """
    least = least_tokens_together(model, topology, pace, dtype_bytes=dtype_bytes)
    if model.mla is None or topology.pcp_size == 1:
        return Choice(least)
    products = pace.flops / 2 * dtype_bytes / pace.bytes_s
    why = (
        f"an element of keys and values is {model.mla.kv_lora_rank} products of a latent, and a rank "
        f"makes {products:,.0f} while one comes from another"
    )
    if least == NEVER:
        return Choice(least, f"{why}, so that each makes all it needs.")
    return Choice(least, f"{why}, so that {topology.pcp_size} share out {least:,} latents and more.")
