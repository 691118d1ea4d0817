"""From which length on a request is worth spreading over its DCP group. Knows bytes and a few times.

A spread request reads `1 - 1/W` fewer of its keys on a rank, and pays an exchange a layer in each step.
The threshold is where both weigh the same:

    tokens * kv_bytes_per_token_and_layer * (1 - 1/W) / bandwidth = seconds of an exchange
"""

import math

from kvspan.config.engine import EngineConfig
from kvspan.config.model import ModelConfig
from kvspan.config.sizes import format_bytes
from kvspan.cost.choice import Choice
from kvspan.cost.latents import NEVER
from kvspan.cost.memory import kv_bytes_per_local_token
from kvspan.cost.pace import BANDWIDTH_BYTES_S, EXCHANGE_S, MULTIPLIED_FLOPS
from kvspan.cost.timed import Timed
from kvspan.cost.weights import active_params, copies_at_home
from kvspan.errors import ConfigError
from kvspan.topology import Topology

STATIC, ELASTIC = "static", "elastic"

MOST_WAIT = 0.5
"""Of the time of a step with an exchange, that spread rows may wait for steps without one."""
WORTH_MEETING = 2
"""Times that what others would wait for a prompt must exceed what sharing it out takes. Over gloo, where
that takes 60 ms, SmolLM2 gains from about 150 tokens on (64 and 128 lose 38 and 19 ms, 256 gain 49)."""


def choose_span(
    asked: EngineConfig,
    model: ModelConfig,
    topology: Topology,
    *,
    interleave: int,
    comm: str,
    device: str,
    kv_dtype_bytes: int,
    timed: Timed | None = None,
) -> Choice[int]:
    """Tokens up to which a request stays on one home; 0 = every request spans its DCP group.

    Args:
        asked: options.
        model: sizes.
        topology: a legal layout.
        interleave: I.
        comm: transport of collectives.
        device: `cpu` or `cuda`.
        kv_dtype_bytes: bytes of a cached element.
        timed: step times of the layout on this machine, if they are known.

    Raises:
        ConfigError: requests cannot be kept at home in the layout.
    """
    if asked.dcp_mode == STATIC:
        return Choice(0)
    _check_homes(topology, interleave=interleave, block_size=asked.block_size)
    if asked.dcp_span_threshold is not None:
        return Choice(asked.dcp_span_threshold)
    w = topology.dcp_size
    token_bytes = kv_bytes_per_local_token(model, topology, kv_dtype_bytes=kv_dtype_bytes)
    exchange_s, bandwidth = EXCHANGE_S[comm], BANDWIDTH_BYTES_S[device]
    if timed is not None:
        exchange_s, bandwidth = timed.exchange_s("a2a", 1), timed.kv_bytes_s
    saved_s = token_bytes / model.num_layers * (1 - 1 / w) / bandwidth
    threshold = max(int(exchange_s / saved_s), 1)
    return Choice(
        threshold,
        f"an exchange over {comm} takes about {exchange_s * 1e6:.0f} us a layer, in which a rank "
        f"reads what {w} ranks save each other of {threshold:,} tokens.",
    )


def choose_spread_every(
    asked: EngineConfig,
    model: ModelConfig,
    topology: Topology,
    *,
    comm: str,
    device: str,
    dtype_bytes: int,
) -> Choice[int]:
    """In every how many steps rows run for which ranks meet, while there are others.

    An exchange costs a step about the same for one row as for all, so what local rows save grows with
    the steps that have none. Spread rows wait for them, by half of their own step's time at the most:

        plain steps in between <= MOST_WAIT * step with an exchange / plain step

    Args:
        asked: options.
        model: sizes.
        topology: a legal layout.
        comm: transport of collectives.
        device: `cpu` or `cuda`.
        dtype_bytes: of an element of the weights.
    """
    if asked.dcp_mode == STATIC:
        return Choice(1)
    meetings = 2 if topology.pcp_size > 1 else 1  # coordinates also hand keys and queries round
    plain_s = active_params(model) * dtype_bytes / topology.tp_size / BANDWIDTH_BYTES_S[device]
    met_s = plain_s + meetings * model.num_layers * EXCHANGE_S[comm]
    every = 1 + int(MOST_WAIT * met_s / plain_s)
    return Choice(
        every,
        f"a step that reads all weights takes about {plain_s * 1e3:.1f} ms, and {met_s * 1e3:.1f} ms "
        f"with an exchange over {comm} in each layer.",
    )


def choose_meet(
    asked: EngineConfig, model: ModelConfig, topology: Topology, *, comm: str, device: str
) -> Choice[int]:
    """New tokens of a prompt from which on PCP coordinates share it out, though one has all its keys.

    A step takes as long as its busiest coordinate needs, so a prompt that its home computes alone keeps
    the rows of all others waiting. To share it out they hand new keys round in each layer:

        tokens * seconds of a token * (1 - 1/P) = WORTH_MEETING * seconds of that

    Args:
        asked: options.
        model: sizes.
        topology: a legal layout.
        comm: transport of collectives.
        device: `cpu` or `cuda`.
    """
    p = topology.pcp_size
    if asked.dcp_mode == STATIC or p == 1:
        return Choice(NEVER)
    token_s = 2 * active_params(model) / topology.tp_size / MULTIPLIED_FLOPS[device]
    meeting_s = 2 * model.num_layers * EXCHANGE_S[comm]
    tokens = math.ceil(WORTH_MEETING * meeting_s / (token_s * (1 - 1 / p)))
    return Choice(
        tokens,
        f"the products of {tokens:,} tokens take {1e3 * tokens * token_s:.1f} ms on one of {p} "
        f"coordinates; sharing them out saves {1e3 * tokens * token_s * (1 - 1 / p):.1f} ms, at least "
        f"{WORTH_MEETING} times what meeting for it takes over {comm}, {1e3 * meeting_s:.1f} ms.",
    )


def queries_at_home(
    asked: EngineConfig, model: ModelConfig, topology: Topology, dtype_bytes: int
) -> Choice[bool] | None:
    """Whether each rank projects all queries of its DCP group: where each is a home, it has to.

    Args:
        asked: options.
        model: sizes.
        topology: a legal layout.
        dtype_bytes: of an element of the weights.

    Returns:
        None where ranks are no homes.

    Raises:
        ConfigError: they are, and were to keep parts of the queries.
    """
    if asked.dcp_mode == STATIC or topology.pcp_size > 1 or topology.dcp_size == 1:
        return None
    if asked.dcp_q_replicate == "off":
        raise ConfigError(
            "--dcp-q-replicate off leaves a rank a part of the query weights, and with --dcp-mode "
            f"elastic each of the {topology.dcp_size} ranks of a DCP group is a home that makes all "
            "queries of its requests: leave it out, or make homes of coordinates with e.g. "
            f"-pcp {topology.dcp_size} -dcp {topology.dcp_size}."
        )
    size = format_bytes(copies_at_home(model, topology) * dtype_bytes)
    why = (
        "a rank makes all queries and outputs of the requests whose home it is; the copies of their "
        f"weights are {size} of it."
    )
    return Choice(True, why if asked.dcp_q_replicate == "auto" else None)


def _check_homes(topology: Topology, *, interleave: int, block_size: int) -> None:
    p, t = topology.pcp_size, topology.tp_size
    if topology.dcp_size == 1:
        ranks = f"-tp {t} -pcp {p} -dcp {p}" if p > 1 else f"-tp {max(t, 2)} -dcp {max(t, 2)}"
        raise ConfigError(
            "--dcp-mode elastic lets long requests span ranks that share a cache, and this layout has "
            f"--decode-context-parallel-size 1: use e.g. {ranks}, or --dcp-mode static."
        )
    if interleave != block_size:
        raise ConfigError(
            "--dcp-mode elastic needs whole blocks on a rank, and --cp-kv-cache-interleave-size "
            f"{interleave} spreads each block of {block_size} tokens: leave it at auto."
        )
