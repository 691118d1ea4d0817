"""What kernels of this host reach, in as many processes as there are ranks, all at once.

Products of few rows are played from a tape where that can be: what Python takes between them is not the
memory's. One call of attention, or of a product of many rows, takes so long that it may be called.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import msgspec
import numpy as np
import torch
from torch import Tensor

from kvspan.attention.backends.registry import choose_kernel
from kvspan.attention.contract import KeyIndex, Need
from kvspan.clock import WallClock
from kvspan.comm.connect import join
from kvspan.comm.group import Group
from kvspan.config.cores import num_cores
from kvspan.errors import EngineDeadError
from kvspan.executor.children import Child, fork_server
from kvspan.layers.linear import ColumnLinear, Storage, pack
from kvspan.layers.matmul import packing_isa
from kvspan.worker.messages import Channel, Failed, decode_answer
from kvspan.worker.tape import Scratch, Tape

_WEIGHT_SHAPE, _NUM_WEIGHTS = (1024, 1024), 96  # 200 MB: past every cache, in pieces of a small model
_FEW_ROWS, _MANY_ROWS = (1, 4, 8, 16, 32), 256
_HEADS, _HEAD_DIM, _BLOCK = (8, 4), 64, 16
_CONTEXT = 1 << 17  # 134 MB of keys and values
_ROUNDS, _SHORT_ROUNDS = 3, 9
"""Few: what a memory that others use gives is told by many probes over a while, not by a long one."""
_TIMEOUT_S = 120.0


class Probe(msgspec.Struct, frozen=True):
    """What kernels of one rank reached.

    Args:
        weights_gbs: by products of one row, on all ranks at once.
        more_rows_gbs: by products of more rows, as (rows, GB/s).
        fewer_ranks_gbs: by products of one row on so many ranks while the others wait, as (ranks, GB/s).
        gemm_tflops: of products of many rows.
        kv_gbs: by attention of one row.
        attention_tflops: by attention of many.
    """

    weights_gbs: float
    more_rows_gbs: tuple[tuple[float, float], ...]
    fewer_ranks_gbs: tuple[tuple[int, float], ...]
    gemm_tflops: float
    kv_gbs: float
    attention_tflops: float


class _Order(msgspec.Struct, frozen=True):
    num_ranks: int
    meeting_path: str


def probe(num_ranks: int) -> Probe:
    """Kernels in `num_ranks` processes at once; what rank 0 reached.

    Raises:
        EngineDeadError: a rank failed.
    """
    server = fork_server()
    order = _Order(num_ranks, server.private_path())
    threads = max(num_cores() // num_ranks, 1)
    children = [
        server.fork("kvspan.bench.probe:run_rank", rank=rank, num_threads=threads)
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
    found = _measure(world.group([range(order.num_ranks)]))
    world.close()
    if rank == 0:
        channel.send(msgspec.msgpack.encode(found))


@torch.inference_mode()
def _measure(group: Group) -> Probe:
    products, num_params = _products()
    tapes = {rows: _without_python(partial(_last, products, rows)) for rows in _FEW_ROWS}
    gbs = {rows: 2 * num_params / s / 1e9 for rows, s in _by_turns(tapes, group).items()}
    fewer = [1 << i for i in range(group.size.bit_length()) if 1 << i < group.size]
    one_row = tapes[_FEW_ROWS[0]]
    some = {n: one_row if group.rank < n else _nothing for n in fewer}
    many_s = _seconds(lambda: products(_MANY_ROWS), group, _ROUNDS)
    kv_bytes = 2 * _CONTEXT * _HEADS[1] * _HEAD_DIM * 2
    reading_s = _seconds(_attention(rows=1, context=_CONTEXT), group, _SHORT_ROUNDS)
    rows = context = 1024
    flops = 4 * _HEADS[0] * _HEAD_DIM * rows * (context - (rows - 1) / 2)
    return Probe(
        weights_gbs=gbs.pop(_FEW_ROWS[0]),
        more_rows_gbs=tuple(gbs.items()),
        fewer_ranks_gbs=tuple((n, 2 * num_params / s / 1e9) for n, s in _by_turns(some, group).items()),
        gemm_tflops=2 * _MANY_ROWS * num_params / many_s / 1e12,
        kv_gbs=kv_bytes / reading_s / 1e9,
        attention_tflops=flops / _seconds(_attention(rows=rows, context=context), group, _ROUNDS) / 1e12,
    )


def _last(products: Callable[[int], Sequence[Tensor]], rows: int) -> Tensor:
    return products(rows)[-1]


def _nothing() -> None:
    """What a rank does that waits."""


def _products() -> tuple[Callable[[int], Sequence[Tensor]], int]:
    """Products of so many rows with many weights, and how many parameters those have."""
    storage = Storage(torch.bfloat16, torch.device("cpu"))
    layers = [ColumnLinear(*_WEIGHT_SHAPE, bias=False, storage=storage) for _ in range(_NUM_WEIGHTS)]
    for layer in layers:
        layer.weight.normal_()
    pack(layers)
    inputs = {rows: torch.randn(rows, _WEIGHT_SHAPE[0]).bfloat16() for rows in (*_FEW_ROWS, _MANY_ROWS)}
    num_params = _NUM_WEIGHTS * _WEIGHT_SHAPE[0] * _WEIGHT_SHAPE[1]
    return lambda rows: [layer(inputs[rows]) for layer in layers], num_params


def _without_python(work: Callable[[], Tensor]) -> Callable[[], object]:
    """Work that is played, if it is made of native calls."""
    if packing_isa() is None:
        return work
    tape = Tape((), Scratch())
    tape.record(work)
    return tape.play


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
    """The median of some rounds: a step meets memory as it usually is."""
    _once(call, group)
    return statistics.median(_once(call, group) for _ in range(num_rounds))


def _by_turns(calls: Mapping[int, Callable[[], object]], group: Group) -> dict[int, float]:
    """Medians of calls that take turns, so that a noisy moment meets all of them."""
    rounds = [{key: _once(call, group) for key, call in calls.items()} for _ in range(_SHORT_ROUNDS + 1)]
    return {key: statistics.median(each[key] for each in rounds[1:]) for key in calls}


def _once(call: Callable[[], object], group: Group) -> float:
    """Seconds of a call that all ranks begin together."""
    clock = WallClock()
    group.all_reduce(torch.zeros(1)).wait()
    start_s = clock.now_s()
    call()
    return clock.now_s() - start_s
