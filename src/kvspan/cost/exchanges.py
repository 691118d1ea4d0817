"""How partial results meet, and who projects queries: by time where it is known, else by bytes."""

from contextlib import suppress

from kvspan.config.engine import EngineConfig
from kvspan.config.model import ModelConfig
from kvspan.cost.choice import Choice
from kvspan.cost.timed import USUAL_BATCH, USUAL_INPUT, USUAL_OUTPUT, Timed
from kvspan.cost.traffic import a2a_bytes_per_row, ag_rs_bytes_per_row, query_gather_bytes_per_row
from kvspan.errors import ConfigError
from kvspan.topology import LayoutMode, Topology, cuts


def choose_exchange(
    asked: EngineConfig,
    model: ModelConfig,
    topology: Topology,
    dtype_bytes: int,
    timed: Timed | None,
) -> Choice[str]:
    """How partial results meet.

    Args:
        asked: options.
        model: sizes.
        topology: a legal layout.
        dtype_bytes: bytes of an element of the activations.
        timed: step times of the layout on this machine, if they are known.

    Raises:
        ConfigError: the layout cannot have the exchange that was asked for.
    """
    if asked.dcp_comm_backend != "auto":
        check_exchange(asked.dcp_comm_backend, model, topology)
        return Choice(asked.dcp_comm_backend)
    if topology.dcp_size == 1:
        return Choice("a2a", "a rank has its sequences whole, so either exchange sends nothing.")
    if timed is not None:
        return _faster_exchange(model, topology, timed)
    h, w, d = topology.query_heads(0, model.heads).size, topology.dcp_size, model.head_dims.out
    latent = None if model.mla is None else model.mla.kv_lora_rank
    a2a = a2a_bytes_per_row(
        num_heads=h, head_dim=d, dcp_size=w, dtype_bytes=dtype_bytes, latent_dim=latent
    )
    ag_rs = ag_rs_bytes_per_row(num_heads=h, head_dim=d, dcp_size=w, latent_dim=latent)
    return Choice(
        "a2a",
        f"a rank sends {a2a} bytes a row and layer in one collective, and {ag_rs} in the two of ag_rs.",
    )


def _faster_exchange(model: ModelConfig, topology: Topology, timed: Timed) -> Choice[str]:
    """The exchange that takes less time, among those that the layout can have; a2a always can."""
    taken_s = {"a2a": timed.exchange_s("a2a")}
    with suppress(ConfigError):
        check_exchange("ag_rs", model, topology)
        taken_s["ag_rs"] = timed.exchange_s("ag_rs")
    best, *others = sorted(taken_s, key=taken_s.__getitem__)
    against = "".join(f", against {taken_s[name] * 1e6:.0f} us of {name}" for name in others)
    return Choice(
        best,
        f"for {USUAL_BATCH} rows it takes {taken_s[best] * 1e6:.0f} us a layer on "
        f"{timed.device.name}{against}.",
    )


def check_exchange(name: str, model: ModelConfig, topology: Topology) -> None:
    """Refuses an exchange that a layout cannot have.

    A reduce-scatter of latents leaves no rank a part of a head: it would reduce that head twice.

    Raises:
        ConfigError: one sentence with the numbers.
    """
    heads, dim = topology.query_heads(0, model.heads).size, model.head_dims.out
    slices = cuts(heads * dim, parts=topology.tp_ranks_per_dcp)
    if name == "ag_rs" and model.mla is not None and any(s.start % dim or s.stop % dim for s in slices):
        raise ConfigError(
            f"--dcp-comm-backend ag_rs needs slices of whole heads with latent attention, and {heads} "
            f"heads of {dim} over --decode-context-parallel-size {topology.dcp_size} are cut inside a "
            "head: use a2a or auto."
        )


def choose_queries(
    asked: EngineConfig,
    model: ModelConfig,
    topology: Topology,
    mode: LayoutMode,
    dtype_bytes: int,
    exchange: str,
    timed: Timed | None,
) -> Choice[bool]:
    """Whether each rank projects all queries of its DCP group, or they are gathered.

    Args:
        asked: options.
        model: sizes.
        topology: a legal layout.
        mode: what DCP does in it.
        dtype_bytes: bytes of an element of the activations.
        exchange: how partial results meet.
        timed: step times of the layout on this machine, if they are known.
    """
    if asked.dcp_q_replicate != "auto":
        return Choice(asked.dcp_q_replicate == "on")
    if timed is not None and mode is not LayoutMode.NONE:
        return _faster_queries(exchange, timed)
    num_heads = topology.query_heads(0, model.heads).size
    gathered = query_gather_bytes_per_row(
        num_heads=num_heads,
        head_dim=model.head_dim,
        dcp_size=topology.dcp_size,
        dtype_bytes=dtype_bytes,
    )
    reasons = {
        LayoutMode.NONE: "a rank has its queries to itself.",
        LayoutMode.COPIES: f"a rank keeps its part of the query weights and sends {gathered} bytes a "
        "row and layer.",
        LayoutMode.DECOUPLED: f"a rank projects the {num_heads} query heads of its group, and no "
        "collective waits for them.",
    }
    return Choice(mode is LayoutMode.DECOUPLED, reasons[mode])


def _faster_queries(exchange: str, timed: Timed) -> Choice[bool]:
    """Whether a usual request is served faster with queries that each rank makes whole."""
    gathered, replicated = (
        timed.request_s(exchange=exchange, replicate_q=whole) * 1e3 for whole in (False, True)
    )
    return Choice(
        replicated < gathered,
        f"{USUAL_INPUT} tokens of prompt and {USUAL_OUTPUT} of output, of {USUAL_BATCH} at a time, take "
        f"{gathered:.0f} ms on {timed.device.name} with queries gathered, {replicated:.0f} replicated.",
    )
