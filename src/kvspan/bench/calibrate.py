"""This host as a row of facts: what its ranks read and multiply side by side, and how fast they meet.

    weights, products, attention    kernels alone, in as many processes as there are ranks, all at once
    collectives                     `bench.exchange`, over shared memory
    operators, rows, steps          the engine on models with next to nothing to compute

A rate that `plan` uses is measured with the code that serves. Knows nothing of plans.
"""

import json
import os
import statistics
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

import msgspec
import numpy as np
import psutil
import torch

from kvspan.attention.backends.registry import choose_kernel
from kvspan.attention.contract import KeyIndex, Need
from kvspan.bench.contender import Case, Contender
from kvspan.bench.exchange import measure as measure_exchange
from kvspan.clock import WallClock
from kvspan.comm.connect import join
from kvspan.comm.group import Group
from kvspan.config.engine import EngineConfig
from kvspan.cost.facts import Collectives, Device, Rates
from kvspan.errors import EngineDeadError
from kvspan.executor.children import Child, fork_server
from kvspan.layers.linear import ColumnLinear, Storage, pack
from kvspan.worker.messages import Channel, Failed, decode_answer

SIZES_BYTES = (1 << 10, 1 << 13, 1 << 16, 1 << 20)
"""What a rank puts in a collective."""
_OPS = {"ag": "all_gather", "rs": "reduce_scatter", "a2a": "merge", "ar": "all_reduce"}
"""`merge` is what an all-to-all of partial results does here."""
_WEIGHT_SHAPE, _NUM_WEIGHTS = (1024, 1024), 96  # 200 MB: past every cache, in pieces of a small model
_FEW_ROWS, _MANY_ROWS = 1, 256
_HEADS, _HEAD_DIM, _BLOCK = (8, 4), 64, 16
_CONTEXT = 1 << 17  # 134 MB of keys and values
_ROUNDS, _SHORT_ROUNDS = 7, 50
"""Short ones take some 10 ms, and a moment in which others run may last longer than seven of them."""
_TIMEOUT_S = 120.0
_LAYERS, _BATCHES = (4, 20), (1, 16)
_OPERATORS = 5
"""That the cost model counts in a layer: q k v, attention, out, gate and up, down."""
_HIDDEN = 128
_TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": _HIDDEN,
    "intermediate_size": _HIDDEN,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 1024,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
}


class Probe(msgspec.Struct, frozen=True):
    """What kernels of one rank reached."""

    weights_gbs: float
    gemm_tflops: float
    kv_gbs: float
    attention_tflops: float


class _Order(msgspec.Struct, frozen=True):
    num_ranks: int
    meeting_path: str


def calibrate(name: str, max_ranks: int, *, told: Callable[[str], None] = lambda _: None) -> Device:
    """Measures this host, by 1 rank and by powers of two up to `max_ranks`.

    Args:
        name: of the row.
        max_ranks: of a layout, at the most; they share the cores.
        told: called with what is being done.

    Raises:
        EngineDeadError: a rank failed.
    """
    counts = [1 << i for i in range(max_ranks.bit_length()) if 1 << i <= max_ranks]
    collectives = []
    for n in counts[1:] or [2]:
        told(f"collectives of {n} ranks")
        collectives.append(_collectives(n))
    rates = []
    for n in counts:
        told(f"kernels and steps of {n} rank{'s' if n > 1 else ''}")
        rates.append(_rates(n, collectives))
    bus = max(collectives[-1].bus_gbs.values())
    return Device(
        name=name,
        memory_bytes=psutil.virtual_memory().available // max_ranks,
        link_gbs=bus,
        inter_node_gbs=bus,
        link_domain=max(max_ranks, 2),
        rates=tuple(rates),
        collectives=tuple(collectives),
        source=f"kvspan plan calibrate, {len(os.sched_getaffinity(0))} cores",
    )


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


def _collectives(num_ranks: int) -> Collectives:
    timings = measure_exchange(num_ranks, SIZES_BYTES, 200)
    found = {(t.op, t.size_bytes): t.median_us for t in timings if t.comm == "shm"}
    points: dict[str, tuple[tuple[int, float], ...]] = {}
    bus: dict[str, float] = {}
    for op, measured in _OPS.items():
        parts = num_ranks if op == "ag" else 1  # what a rank puts in is a part of what is gathered
        line = [(size * parts, found[measured, size]) for size in SIZES_BYTES]
        points[op] = tuple(line)
        (size0, us0), (size1, us1) = line[-2:]
        shared = (2 if op == "ar" else 1) * (num_ranks - 1) / num_ranks
        bus[op] = (size1 - size0) * shared / max(us1 - us0, 1e-3) / 1e3
    return Collectives(num_ranks=num_ranks, points_us=points, bus_gbs=bus)


def _rates(num_ranks: int, collectives: list[Collectives]) -> Rates:
    probe = _probe(num_ranks)
    meeting = {c.num_ranks: c for c in collectives}.get(num_ranks)
    steps_us = {(layers, batch): _step_us(num_ranks, layers, batch) for layers, batch in _tiny_cases()}
    (few, many), (one, several) = _LAYERS, _BATCHES
    layer = (steps_us[many, one] - steps_us[few, one]) / (many - few)
    wide = (steps_us[many, several] - steps_us[few, several]) / (many - few)
    reduces = 0.0 if meeting is None else 2 * meeting.time_us("ar", 2 * _HIDDEN)
    layer_row = max(wide - layer, 0.0) / (several - one)
    row = (steps_us[few, several] - steps_us[few, one]) / (several - one) - few * layer_row
    meetings = {} if meeting is None else _meetings_us(meeting, alone_us=layer)
    return Rates(
        num_ranks=num_ranks,
        weights_gbs=probe.weights_gbs,
        kv_gbs=probe.kv_gbs,
        gemm_tflops={"bf16": probe.gemm_tflops},
        attention_tflops=probe.attention_tflops,
        kernel_us=max(layer - reduces, 0.0) / _OPERATORS,
        step_us=max(steps_us[few, one] - few * layer, 0.0),
        row_us=max(row, 0.0),
        layer_row_us=layer_row,
        meeting_us=meetings,
    )


def _meetings_us(collectives: Collectives, *, alone_us: float) -> dict[str, float]:
    """What a layer with next to nothing to exchange takes beside collectives, by what is exchanged.

    Args:
        collectives: of as many ranks.
        alone_us: of such a layer without DCP.
    """
    n, least = collectives.num_ranks, {op: points[0][1] for op, points in collectives.points_us.items()}

    def layer_us(exchange: str, replicate_q: str) -> float:
        (few, many), (one, _) = _LAYERS, _BATCHES
        choices: dict[str, int | str] = {
            "decode_context_parallel_size": n,
            "dcp_comm_backend": exchange,
            "dcp_q_replicate": replicate_q,
        }
        return (_step_us(n, many, one, choices) - _step_us(n, few, one, choices)) / (many - few)

    merged = layer_us("a2a", "on")
    beside = {
        "gather": layer_us("a2a", "off") - merged - least["ag"],
        "a2a": merged - alone_us - least["a2a"],
        "ag_rs": layer_us("ag_rs", "on") - alone_us - least["ag"] - least["rs"],
    }
    return {name: max(us, 0.0) for name, us in beside.items()}


def _tiny_cases() -> list[tuple[int, int]]:
    return [(layers, batch) for layers in _LAYERS for batch in _BATCHES]


def _step_us(
    num_ranks: int, layers: int, batch: int, choices: Mapping[str, int | str] = MappingProxyType({})
) -> float:
    """Microseconds in which the engine decodes a batch with a model of next to no work.

    Args:
        num_ranks: T.
        layers: of the model.
        batch: sequences.
        choices: further options of the engine, by name.
    """
    with tempfile.TemporaryDirectory() as directory:
        config = {**_TINY, "num_hidden_layers": layers}
        Path(directory, "config.json").write_text(json.dumps(config))
        asked = EngineConfig.from_mapping(
            {
                "model": directory,
                "load_format": "dummy",
                "tensor_parallel_size": num_ranks,
                "max_model_len": 256,
                "max_num_seqs": max(_BATCHES),
                "kv_cache_memory": 64 << 20,
                **choices,
            }
        )
        contender = Contender(asked)
        try:
            contender.fill(Case(32, batch), num_steps=128, seed=0)
            return statistics.quantiles(contender.decode(128).seconds, n=4)[0] * 1e6  # as above
        finally:
            contender.shutdown()


def _probe(num_ranks: int) -> Probe:
    """Kernels in `num_ranks` processes at once; what rank 0 reached."""
    server = fork_server()
    order = _Order(num_ranks, server.private_path())
    threads = max(len(os.sched_getaffinity(0)) // num_ranks, 1)
    children = [
        server.fork("kvspan.bench.calibrate:run_rank", rank=rank, num_threads=threads)
        for rank in range(num_ranks)
    ]
    try:
        for child in children:
            Channel(child.channel).send(msgspec.msgpack.encode(order))
        return _answer(children[0])
    finally:
        for child in children:
            child.kill()
            child.close()


def _answer(child: Child) -> Probe:
    body = Channel(child.channel).receive()
    if body is None:
        raise EngineDeadError(f"Rank {child.rank} died while it measured.")
    try:
        return msgspec.msgpack.decode(body, type=Probe)
    except msgspec.ValidationError:
        failed = decode_answer(body)
        assert isinstance(failed, Failed)
        raise EngineDeadError(f"Rank {failed.rank} failed: {failed.sentence}") from None


def run_rank(channel: Channel, payload: bytes, rank: int) -> None:
    """Target of a rank's process: measures, and sends what it found."""
    order = msgspec.msgpack.decode(payload, type=_Order)
    world = join(
        "shm", rank=rank, size=order.num_ranks, store_path=order.meeting_path, timeout_s=_TIMEOUT_S
    )
    probe = _measure(world.group([range(order.num_ranks)]))
    world.close()
    if rank == 0:
        channel.send(msgspec.msgpack.encode(probe))


@torch.inference_mode()
def _measure(group: Group) -> Probe:
    storage = Storage(torch.bfloat16, torch.device("cpu"))
    layers = [ColumnLinear(*_WEIGHT_SHAPE, bias=False, storage=storage) for _ in range(_NUM_WEIGHTS)]
    for layer in layers:
        layer.weight.normal_()
    pack(layers)
    num_params = _NUM_WEIGHTS * _WEIGHT_SHAPE[0] * _WEIGHT_SHAPE[1]

    def products(num_rows: int, num_rounds: int) -> float:
        x = torch.randn(num_rows, _WEIGHT_SHAPE[0]).bfloat16()
        return _seconds(lambda: [layer(x) for layer in layers], group, num_rounds)

    kv_bytes = 2 * _CONTEXT * _HEADS[1] * _HEAD_DIM * 2
    reading_s = _seconds(_attention(rows=1, context=_CONTEXT), group, _SHORT_ROUNDS)
    rows = context = 1024
    flops = 4 * _HEADS[0] * _HEAD_DIM * rows * (context - (rows - 1) / 2)
    return Probe(
        weights_gbs=2 * num_params / products(_FEW_ROWS, _SHORT_ROUNDS) / 1e9,
        gemm_tflops=2 * _MANY_ROWS * num_params / products(_MANY_ROWS, _ROUNDS) / 1e12,
        kv_gbs=kv_bytes / reading_s / 1e9,
        attention_tflops=flops / _seconds(_attention(rows=rows, context=context), group, _ROUNDS) / 1e12,
    )


def _attention(*, rows: int, context: int) -> Callable[[], object]:
    """Attention of the last rows of one sequence over all its keys."""
    heads, kv_heads = _HEADS
    blocks = torch.randn(-(-context // _BLOCK), kv_heads, _BLOCK, _HEAD_DIM).bfloat16()
    values, query = torch.randn_like(blocks), torch.randn(rows, heads, _HEAD_DIM).bfloat16()
    index = KeyIndex(
        row_starts=(0, rows),
        tables=(torch.randperm(len(blocks)),),
        first=np.zeros(rows, np.int64),
        last=context - np.arange(rows)[::-1],
    )
    need = Need(device="cpu", dtype=torch.bfloat16, head_dim=_HEAD_DIM, value_dim=_HEAD_DIM)
    kernel = choose_kernel(need)
    return lambda: kernel(query, blocks, values, index, _HEAD_DIM**-0.5)


def _seconds(call: Callable[[], object], group: Group, num_rounds: int) -> float:
    """The best of some rounds that all ranks begin together: what else runs here only slows them."""
    clock, together = WallClock(), torch.zeros(1)
    taken = []
    for _ in range(num_rounds + 1):
        group.all_reduce(together).wait()
        start_s = clock.now_s()
        call()
        taken.append(clock.now_s() - start_s)
    return min(taken[1:])
