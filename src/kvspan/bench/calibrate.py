"""This host as a row of facts: what its ranks read and multiply side by side, and how fast they meet.

    weights, products, attention    kernels alone (`bench.probe`)
    collectives                     `bench.exchange`, over shared memory
    operators, rows, steps          the engine on models of which all is known (`bench.tiny`)

What depends on it is measured in both ways in which steps run: played from a tape, and by Python. A rate
that `plan` uses is measured with the code that serves. Everything is measured in several short rounds,
by turns, and medians count: a host that others use as well has fast memory in one minute and slow in
the next. Knows nothing of plans.
"""

import json
import statistics
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec
import psutil

from kvspan.bench.exchange import Timing
from kvspan.bench.exchange import measure as measure_exchange
from kvspan.bench.probe import Probe, probe
from kvspan.bench.tiny import HIDDEN_SIZE, bare_layer_us, tiny_steps
from kvspan.config.cores import num_cores
from kvspan.cost.facts import Collectives, Device, Rates, sent_share
from kvspan.layers.matmul import packing_isa

SIZES_BYTES = (1 << 10, 1 << 13, 1 << 16, 1 << 20)
"""What a rank puts in a collective."""
_OPS = {"ag": "all_gather", "rs": "reduce_scatter", "a2a": "merge", "ar": "all_reduce"}
"""`merge` is what an all-to-all of partial results does here."""
NUM_ROUNDS = 3
"""Of everything; an odd number, so that a median is a measurement."""
_EXCHANGES = 160
"""Of each kind and size, in a round."""
_OPERATORS = 5
"""That the cost model counts in a layer: q k v, attention, out, gate and up, down."""
_ACTIVATION_BYTES = {True: 2, False: 4}
"""Of tiny models, by whether they are played."""

T = TypeVar("T")


class _Round(msgspec.Struct, frozen=True):
    rates: tuple[Rates, ...]
    collectives: tuple[Collectives, ...]


def calibrate(
    name: str,
    max_ranks: int,
    *,
    num_rounds: int = NUM_ROUNDS,
    told: Callable[[str], None] = lambda _: None,
) -> Device:
    """Measures this host, by 1 rank and by powers of two up to `max_ranks`.

    Args:
        name: of the row.
        max_ranks: of a layout, at the most; they share the cores.
        num_rounds: of everything.
        told: called with what is being done.

    Raises:
        EngineDeadError: a rank failed.
    """
    counts = [1 << i for i in range(max_ranks.bit_length()) if 1 << i <= max_ranks]
    rounds = []
    for number in range(num_rounds):
        told(f"round {number + 1} of {num_rounds}")
        rounds.append(_round(counts, told))
    found = typical(rounds)
    bus = max(bus for each in found.collectives for bus in each.bus_gbs.values())
    return Device(
        name=name,
        memory_bytes=psutil.virtual_memory().available // max_ranks,
        link_gbs=bus,
        inter_node_gbs=bus,
        link_domain=max(max_ranks, 2),
        rates=found.rates,
        collectives=found.collectives,
        source=f"kvspan plan calibrate, {num_cores()} cores",
    )


def at_the_moment(device: Device, *, num_ranks: int, reached: Sequence[Probe]) -> Device:
    """A row in which kernels of so many ranks reach what they just did, and all else is as it was.

    Args:
        device: a calibrated row.
        num_ranks: of whom `reached` tells.
        reached: the latest probes; their median counts.
    """
    kernels = _kernels(typical(reached))
    rates = [
        msgspec.structs.replace(each, **kernels) if each.num_ranks == num_ranks else each
        for each in device.rates
    ]
    return msgspec.structs.replace(device, rates=tuple(rates))


def typical(rounds: Sequence[T]) -> T:
    """Values like those of the rounds, in which each number is the median of theirs."""
    built = [msgspec.to_builtins(each) for each in rounds]
    return msgspec.convert(_median(built), type=type(rounds[0]))


def as_toml(device: Device) -> str:
    """The row as a file that `--facts` reads."""
    lines = [
        f"# {device.source}",
        f'[accelerators."{device.name}"]',
        f"memory_gib = {device.memory_bytes / 2**30:.3f}",
        f"link = {device.link_gbs:.3f}",
        f"inter_node = {device.inter_node_gbs:.3f}",
        f"link_domain = {device.link_domain}",
        f'source = "{device.source}"',
    ]
    for key, rows in (("rates", device.rates), ("collectives", device.collectives)):
        for row in rows:
            lines += ["", f'[[accelerators."{device.name}".{key}]]']
            values = msgspec.to_builtins(row)
            lines += [f"{field} = {_toml(value)}" for field, value in values.items()]
    return "\n".join(lines) + "\n"


def _toml(value: object) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_toml(v)}" for key, v in value.items()) + " }"
    return json.dumps(value if not isinstance(value, float) else round(value, 6))


def _median(values: Sequence[Any]) -> Any:
    """Of numbers; of what holds them, element by element; of all else they are alike."""
    first = values[0]
    if isinstance(first, dict):
        return {key: _median([each[key] for each in values]) for key in first}
    if isinstance(first, (list, tuple)):
        return [_median(each) for each in zip(*values, strict=True)]
    alike = all(each == first for each in values)
    return first if alike else statistics.median(values)


def _round(counts: Sequence[int], told: Callable[[str], None]) -> _Round:
    """Measures everything once."""
    collectives: list[Collectives] = []
    for n in counts[1:] or [2]:
        told(f"collectives of {n} ranks")
        timings = measure_exchange(n, SIZES_BYTES, _EXCHANGES, over=("shm",))
        collectives += [_collectives(n, timings, played=played) for played in (True, False)]
    rates: list[Rates] = []
    for n in counts:
        told(f"kernels and steps of {n} rank{'s' if n > 1 else ''}")
        rates += _rates(n, collectives)
    return _Round(tuple(rates), tuple(collectives))


def _collectives(num_ranks: int, timings: Sequence[Timing], *, played: bool) -> Collectives:
    found = {(t.op, t.size_bytes): t.median_us for t in timings if t.played == played}
    points: dict[str, tuple[tuple[int, float], ...]] = {}
    bus: dict[str, float] = {}
    for op, measured in _OPS.items():
        parts = num_ranks if op == "ag" else 1  # what a rank puts in is a part of what is gathered
        line = [(size * parts, found[measured, size]) for size in SIZES_BYTES]
        points[op] = tuple(line)
        (size0, us0), (size1, us1) = line[-2:]
        bus[op] = (size1 - size0) * sent_share(op, num_ranks) / max(us1 - us0, 1e-3) / 1e3
    return Collectives(num_ranks=num_ranks, points_us=points, bus_gbs=bus, played=played)


def _rates(num_ranks: int, collectives: Sequence[Collectives]) -> list[Rates]:
    """Of so many ranks, in each way in which their steps run."""
    reached = probe(num_ranks)
    ways = (False,) if packing_isa() is None else (False, True)
    return [_rates_of(num_ranks, reached, collectives, played=played) for played in ways]


def _kernels(reached: Probe) -> dict[str, Any]:
    """What of `Rates` a probe tells."""
    return {
        "weights_gbs": reached.weights_gbs,
        "more_rows_gbs": reached.more_rows_gbs,
        "fewer_ranks_gbs": reached.fewer_ranks_gbs,
        "kv_gbs": reached.kv_gbs,
        "gemm_tflops": {"bf16": reached.gemm_tflops},
        "attention_tflops": reached.attention_tflops,
    }


def _rates_of(
    num_ranks: int,
    reached: Probe,
    collectives: Sequence[Collectives],
    *,
    played: bool,
) -> Rates:
    steps = tiny_steps(num_ranks, played=played)
    meeting = next((c for c in collectives if (c.num_ranks, c.played) == (num_ranks, played)), None)
    reduces = 0.0
    if meeting is not None and num_ranks > 1:
        reduces = 2 * meeting.time_us("ar", HIDDEN_SIZE * _ACTIVATION_BYTES[played])
    kernels = steps.layer_us - reduces
    return Rates(
        num_ranks=num_ranks,
        **_kernels(reached),
        kernel_us=max(kernels, 0.0) / _OPERATORS,
        step_us=steps.step_us,
        row_us=steps.row_us,
        layer_row_us=steps.layer_row_us,
        meeting_us={} if meeting is None or num_ranks == 1 else _meetings_us(meeting),
        played=played,
    )


def _meetings_us(collectives: Collectives) -> dict[str, float]:
    """What a layer with next to nothing to exchange takes beside collectives, by what is exchanged.

    Args:
        collectives: of as many ranks, in the way in which steps run.
    """
    n, least = collectives.num_ranks, {op: points[0][1] for op, points in collectives.points_us.items()}

    def layer_us(**choices: int | str) -> float:
        return bare_layer_us(n, played=collectives.played, choices=choices)

    def exchanging_us(exchange: str, replicate_q: str) -> float:
        return layer_us(
            decode_context_parallel_size=n, dcp_comm_backend=exchange, dcp_q_replicate=replicate_q
        )

    alone, merged = layer_us(), exchanging_us("a2a", "on")
    beside = {
        "gather": exchanging_us("a2a", "off") - merged - least["ag"],
        "a2a": merged - alone - least["a2a"],
    }
    if not collectives.played:  # partials that are gathered and scattered are left to Python
        beside["ag_rs"] = exchanging_us("ag_rs", "on") - alone - least["ag"] - least["rs"]
    return {name: max(us, 0.0) for name, us in beside.items()}
