"""What travels for a sequence's cached context: its keys to the rows, or the rows' queries to the keys.

    allgather_q     every rank attends for all rows over its own keys, and partial results are exchanged
    allgather_kv    every rank gathers the keys, and attends for its own heads; the keys of the step's
                    tokens are there already, so a prompt without cached context moves nothing

Where every rank has its sequences whole (W = 1) nothing travels, and rows attend in the second way if
that lets PCP coordinates make keys and values of latents together (`cost.together`).

A rule is made of bytes, and looks at numbers of tokens of whole sequences: ranks decide alike. Knows no
times. Layouts that cut heads are left to queries, since two ranks would attend for the same head.
"""

import math
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from kvspan.config.engine import EngineConfig
from kvspan.config.model import ModelConfig
from kvspan.cost.choice import Choice
from kvspan.cost.latents import least_rows_to_expand
from kvspan.cost.traffic import (
    a2a_bytes_per_row,
    ag_rs_bytes_per_row,
    key_gather_bytes_per_token,
    query_gather_bytes_per_row,
)
from kvspan.errors import ConfigError
from kvspan.topology import Topology, cuts

FEWEST_BYTES = "fewest_bytes"
"""The strategy that takes for each sequence of a step what moves less."""
WORKSPACE_BYTES = 256 << 20
"""Of a rank, for keys and values that are gathered or made of cached latents."""
_TOO_MUCH = 1 << 38
"""Bytes of a token that no rows are worth; times the longest context it is still an int64."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillRule:
    """Which sequences of a step have their keys gathered.

    Args:
        row_bytes: that a rank sends for a row whose query moves; 0 = nothing is saved if it stays, 1 =
            it stays, and work is saved.
        token_bytes: that a rank sends for a cached token whose key moves.
        least_rows: rows from which on cached context is worth the work, whatever it weighs.
    """

    row_bytes: int
    token_bytes: int
    least_rows: int

    @classmethod
    def of(
        cls,
        strategy: str,
        model: ModelConfig,
        topology: Topology,
        *,
        exchange: str,
        replicate_q: bool,
        dtype_bytes: int,
    ) -> Self:
        """The rule of a strategy.

        Args:
            strategy: `allgather_q`, `allgather_kv` or `FEWEST_BYTES`.
            model: sizes.
            topology: a legal layout.
            exchange: how partial results meet, `a2a` or `ag_rs`.
            replicate_q: whether queries need not be gathered.
            dtype_bytes: bytes of an element of queries, keys and partial results.
        """
        least_rows = 2 if model.mla is None else least_rows_to_expand(model.mla)
        whole = has_whole_heads(model, topology)
        if topology.dcp_size == 1:  # nothing travels, but coordinates make keys of the same latents
            is_shared = whole and model.mla is not None and topology.pcp_size > 1
            return cls(row_bytes=int(is_shared), token_bytes=0, least_rows=least_rows)
        gathers = strategy == "allgather_kv" or whole
        row_bytes = bytes_of_row(model, topology, exchange, replicate_q, dtype_bytes) if gathers else 0
        token_bytes = bytes_of_token(model, topology, dtype_bytes)
        fixed = {"allgather_q": _TOO_MUCH, "allgather_kv": 0}
        return cls(
            row_bytes=row_bytes,
            token_bytes=fixed.get(strategy, token_bytes),
            least_rows=least_rows,
        )

    def gathers(self, num_rows: NDArray[np.int64], num_cached: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which sequences have their keys gathered.

        Args:
            num_rows: [S], tokens that each sequence computes in the step.
            num_cached: [S], tokens before those.

        Returns:
            [S] bool. A sequence without context is, where that saves anything: its keys are all there.
        """
        saves = num_cached * self.token_bytes < num_rows * self.row_bytes
        worth_it: NDArray[np.bool_] = saves & ((num_rows >= self.least_rows) | (num_cached == 0))
        return worth_it


def has_whole_heads(model: ModelConfig, topology: Topology) -> bool:
    """Whether each rank's slice of the attention output is made of whole heads."""
    heads, dim = topology.query_heads(0, model.heads).size, model.head_dims.out
    return all(part.start % dim == 0 for part in cuts(heads * dim, parts=topology.tp_ranks_per_dcp))


def choose_prefill(
    asked: EngineConfig,
    model: ModelConfig,
    topology: Topology,
    *,
    exchange: str,
    replicate_q: bool,
    dtype_bytes: int,
) -> Choice[str]:
    """What travels for cached context.

    Args:
        asked: options.
        model: sizes.
        topology: a legal layout.
        exchange: how partial results meet.
        replicate_q: whether queries need not be gathered.
        dtype_bytes: bytes of an element of the activations.
    """
    if asked.prefill_strategy != "auto":
        return Choice(asked.prefill_strategy)
    if topology.dcp_size == 1:
        return Choice("allgather_q", "a rank has its sequences whole, so nothing travels.")
    if not has_whole_heads(model, topology):
        return Choice(
            "allgather_q", "heads are cut between ranks, and gathered keys would be worked on twice."
        )
    rule = PrefillRule.of(
        FEWEST_BYTES,
        model,
        topology,
        exchange=exchange,
        replicate_q=replicate_q,
        dtype_bytes=dtype_bytes,
    )
    return Choice(
        FEWEST_BYTES,
        f"in a layer a rank sends {rule.row_bytes} bytes for a row that goes to the keys and "
        f"{rule.token_bytes} for a cached token that comes to it, so up to "
        f"{rule.row_bytes // rule.token_bytes} of them a row do.",
    )


def workspace_tokens(
    asked: EngineConfig, model: ModelConfig, topology: Topology, dtype_bytes: int
) -> int:
    """Cached tokens that a rank gathers or expands at once: whole blocks, and equal shares of the group.

    While one half is attended to the other is gathered, so a rank's share is even.

    Raises:
        ConfigError: what was asked is less than that.
    """
    dims, heads = model.head_dims, topology.query_heads(0, model.heads).size
    token_bytes = heads * (dims.query + dims.out) * dtype_bytes
    unit = math.lcm(asked.block_size, 2 * topology.dcp_size)
    tokens = asked.cp_workspace_tokens
    if tokens is None:
        return max(WORKSPACE_BYTES // token_bytes // unit, 1) * unit
    if tokens < unit:
        raise ConfigError(
            f"--cp-workspace-tokens {tokens} is less than whole blocks of --block-size "
            f"{asked.block_size} in equal shares of --decode-context-parallel-size "
            f"{topology.dcp_size} ranks: raise it to at least {unit}."
        )
    return tokens // unit * unit


def bytes_of_token(model: ModelConfig, topology: Topology, dtype_bytes: int) -> int:
    """Bytes that a rank sends in a layer for a cached token that comes to the rows.

    Args:
        model: sizes.
        topology: a legal layout.
        dtype_bytes: bytes of an element of the activations.
    """
    return key_gather_bytes_per_token(
        num_kv_heads=topology.kv_heads(0, model.heads).size,
        cached_dim=model.head_dims.cached,
        dcp_size=topology.dcp_size,
        dtype_bytes=dtype_bytes,
    )


def bytes_of_row(
    model: ModelConfig, topology: Topology, exchange: str, replicate_q: bool, dtype_bytes: int
) -> int:
    """Bytes that a rank sends in a layer for a row that goes to the keys, and its partial results.

    Args:
        model: sizes.
        topology: a legal layout.
        exchange: how partial results meet.
        replicate_q: whether queries need not be gathered.
        dtype_bytes: bytes of an element of the activations.
    """
    dims, dcp_size = model.head_dims, topology.dcp_size
    heads = topology.query_heads(0, model.heads).size
    result = (
        ag_rs_bytes_per_row(num_heads=heads, head_dim=dims.out, dcp_size=dcp_size)
        if exchange == "ag_rs"
        else a2a_bytes_per_row(
            num_heads=heads, head_dim=dims.out, dcp_size=dcp_size, dtype_bytes=dtype_bytes
        )
    )
    # A replicated query is made whole on its own rank, and then travels to other coordinates alone.
    makers = min(topology.pcp_size, dcp_size) if replicate_q else dcp_size
    return result + query_gather_bytes_per_row(
        num_heads=heads, head_dim=dims.query, dcp_size=makers, dtype_bytes=dtype_bytes
    )
