"""From which length on a request is worth spreading over its DCP group. Knows bytes and a few times.

A spread request reads `1 - 1/W` fewer of its keys on a rank, and pays an exchange a layer in each step.
The threshold is where both weigh the same:

    tokens * kv_bytes_per_token_and_layer * (1 - 1/W) / bandwidth = seconds of an exchange
"""

from kvspan.config.engine import EngineConfig
from kvspan.config.model import ModelConfig
from kvspan.cost.choice import Choice
from kvspan.cost.memory import kv_bytes_per_local_token
from kvspan.cost.timed import Timed
from kvspan.errors import ConfigError
from kvspan.topology import Topology

STATIC, ELASTIC = "static", "elastic"

EXCHANGE_S = {"shm": 12e-6, "gloo": 1e-3, "nccl": 20e-6}
"""Seconds of merging 16 KiB of partials at 2 ranks: the first two as measured (docs/results/cpu.md); for
NCCL on NVLink about what `data/hardware.json` has for small collectives."""
BANDWIDTH_BYTES_S = {"cpu": 24e9, "cuda": 3.35e12}
"""Bytes a rank reads in a second: one core of docs/results/cpu.md, an H100 by its data sheet."""


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
        ConfigError: the layout has no homes.
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
    threshold = int(exchange_s / (token_bytes / model.num_layers * (1 - 1 / w) / bandwidth))
    return Choice(
        threshold,
        f"an exchange over {comm} takes about {exchange_s * 1e6:.0f} us a layer, in which a rank "
        f"reads what {w} ranks save each other of {threshold:,} tokens.",
    )


def _check_homes(topology: Topology, *, interleave: int, block_size: int) -> None:
    p, w = topology.pcp_size, topology.dcp_size
    if p == 1 or w == 1:
        raise ConfigError(
            "--dcp-mode elastic needs homes, which are PCP coordinates that share a cache, and this "
            f"layout has --prefill-context-parallel-size {p} and --decode-context-parallel-size {w}: "
            f"use e.g. -tp {topology.tp_size} -pcp 2 -dcp 2, or --dcp-mode static."
        )
    if interleave != block_size:
        raise ConfigError(
            "--dcp-mode elastic needs whole blocks on a rank, and --cp-kv-cache-interleave-size "
            f"{interleave} spreads each block of {block_size} tokens: leave it at auto."
        )
