"""Ranks that misbehave when told to, and ranks that only talk: targets for tests of processes.

Importable in a forked rank, which a test module is not. Knows no models.
"""

import os
import signal
import sys
from collections.abc import Callable
from enum import StrEnum
from typing import Any

import msgspec
import torch
from torch import Tensor

from kvspan.comm.connect import join
from kvspan.comm.group import Group
from kvspan.errors import ModelError
from kvspan.step import Fill, RankReport, Sampled, Step, StepResult, TimedSpan
from kvspan.worker.loop import serve
from kvspan.worker.messages import Channel

DTYPES = {
    str(d).removeprefix("torch."): d
    for d in (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8)
}


class Deed(StrEnum):
    """What a toy rank does."""

    OBEY = "obey"
    EXIT = "exit"
    RAISE = "raise"
    REFUSE = "refuse"
    KILL_ITSELF = "kill itself"
    STOP_ITSELF = "stop itself"
    SPIN = "spin"


class Toy(msgspec.Struct, frozen=True):
    """Who does what, and when.

    Args:
        deeds: what a rank does; one that is not named obeys.
        step_id: in which step they do it; None = while loading.
        deaf: whether ranks go on for ever after `Shutdown`.
        store_path: if given, every step sums over all ranks.
        world_size: ranks, for `store_path`.
        comm: the transport, likewise.
        patience_s: that a sum may take before it raises.
    """

    deeds: dict[int, Deed] = {}
    step_id: int | None = None
    deaf: bool = False
    store_path: str = ""
    world_size: int = 1
    comm: str = "gloo"
    patience_s: float = 600.0


def run(channel: Channel, payload: bytes, rank: int) -> None:
    """Target: a rank that echoes, or does its deed. The payload is a `Toy`."""
    serve(channel, ToyWorker(msgspec.msgpack.decode(payload, type=Toy), rank), rank)


class ToyWorker:
    """Answers a step with its rows' request ids and first new tokens.

    Args:
        toy: what to do.
        rank: of this process.
    """

    def __init__(self, toy: Toy, rank: int) -> None:
        self._toy = toy
        self._rank = rank
        self._world = (
            join(
                toy.comm,
                rank=rank,
                size=toy.world_size,
                store_path=toy.store_path,
                timeout_s=toy.patience_s,
            )
            if toy.store_path
            else None
        )
        self._group = self._world.group([range(toy.world_size)]) if self._world is not None else None

    def load(self) -> RankReport:
        """A report whose numbers tell the process: pid, torch's threads, SIGINT's handling."""
        self._maybe(None)
        ignores = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        return RankReport(self._rank, os.getpid(), torch.get_num_threads(), int(ignores))

    def allocate_cache(self, num_blocks: int) -> None:
        """Refuses a negative number."""
        if num_blocks < 0:
            raise MemoryError(f"{num_blocks} blocks")

    def fill(self, fill: Fill) -> None:
        """Has no cache."""

    def watch(self, on: bool) -> list[TimedSpan]:
        """A span whose name tells what was said."""
        return [TimedSpan(f"{self._rank} {on}", 0.0, 1.0, 1.0)]

    def execute(self, step: Step) -> StepResult:
        """Echoes."""
        self._maybe(step.step_id)
        if self._group is not None:
            self._group.all_reduce(torch.ones(1)).wait()
        return StepResult(
            step.step_id,
            tuple(Sampled(row.request_id, next(iter(row.new_tokens), None)) for row in step.rows),
        )

    def close(self) -> None:
        """Ends, unless it is to be deaf."""
        while self._toy.deaf:
            signal.pause()

    def _maybe(self, step_id: int | None) -> None:
        if step_id == self._toy.step_id:
            _do(self._toy.deeds.get(self._rank, Deed.OBEY), self._rank)


def _do(deed: Deed, rank: int) -> None:
    match deed:
        case Deed.OBEY:
            return
        case Deed.EXIT:
            sys.exit(3)
        case Deed.RAISE:
            raise ArithmeticError(f"rank {rank} cannot count")
        case Deed.REFUSE:
            raise ModelError("toy.safetensors: 3 bytes are missing.")
        case Deed.KILL_ITSELF:
            os.kill(os.getpid(), signal.SIGKILL)
        case Deed.STOP_ITSELF:
            os.kill(os.getpid(), signal.SIGSTOP)
        case Deed.SPIN:
            while True:
                pass


class Collective(msgspec.Struct, frozen=True):
    """One collective among the ranks of a group; what each puts in is `contribution`.

    Args:
        op: `all_reduce`, `all_gather`, `reduce_scatter` or `all_to_all`.
        dtype: name of a torch dtype.
        sizes: dim 0 for each rank (its sum, for all_reduce); all_to_all sends `sizes[(i + j) % size]`
            elements from rank i to rank j.
        width: elements of each row.
    """

    op: str
    dtype: str
    sizes: tuple[int, ...]
    width: int = 1


class Talk(msgspec.Struct, frozen=True):
    """What ranks that only talk do: all collectives are begun before the first is waited for."""

    comm: str
    store_path: str
    world_size: int
    partition: tuple[tuple[int, ...], ...]
    collectives: tuple[Collective, ...]


class Heard(msgspec.Struct, frozen=True):
    """What one rank heard in a `Talk`: for each collective its result as nested lists."""

    group_rank: int
    results: list[list[Any]]


def talk(channel: Channel, payload: bytes, rank: int) -> None:
    """Target: does a `Talk` and sends back a `Heard`."""
    told = msgspec.msgpack.decode(payload, type=Talk)
    world = join(told.comm, rank=rank, size=told.world_size, store_path=told.store_path)
    group = world.group(told.partition)
    begun = [_begin(group, collective) for collective in told.collectives]
    results = [finish() for finish in begun]
    world.close()
    channel.send(msgspec.msgpack.encode(Heard(group.rank, results)))


class Rounds(msgspec.Struct, frozen=True):
    """Collectives of one element in a row, in two groups by turns: all ranks, and two halves."""

    comm: str
    store_path: str
    world_size: int
    count: int


def go_rounds(channel: Channel, payload: bytes, rank: int) -> None:
    """Target: does `Rounds`, and sends back in how many of them the sum was right."""
    told = msgspec.msgpack.decode(payload, type=Rounds)
    size, half = told.world_size, told.world_size // 2
    world = join(told.comm, rank=rank, size=size, store_path=told.store_path)
    partitions = ((tuple(range(size)),), (tuple(range(half)), tuple(range(half, size))))
    groups = [(world.group(p), next(g for g in p if rank in g)) for p in partitions]
    right = 0
    for i in range(told.count):
        group, members = groups[i % len(groups)]
        got = group.all_reduce(torch.tensor([float(i * (rank + 1))])).wait()
        right += int(got.item() == float(i * sum(member + 1 for member in members)))
    world.close()
    channel.send(msgspec.msgpack.encode(right))


def contribution(collective: Collective, rank: int, rows: int) -> Tensor:
    """[rows, width] of small whole numbers that tell ranks and places apart; their sums are exact."""
    numbers = torch.arange(rows * collective.width) * 7 + 3 * rank
    return (numbers % 11).to(DTYPES[collective.dtype]).view(rows, collective.width)


def _begin(group: Group, collective: Collective) -> Callable[[], list[Any]]:
    """Begins a collective; what is returned waits for it."""
    sizes, rank = collective.sizes, group.rank

    def put(rows: int) -> Tensor:
        return contribution(collective, rank, rows)

    match collective.op:
        case "all_reduce":
            reduced = group.all_reduce(put(sum(sizes)))
            return lambda: _listed(reduced.wait(), collective)
        case "all_gather":
            gathered = group.all_gather(put(sizes[rank]), sizes)
            return lambda: _listed(gathered.wait(), collective)
        case "reduce_scatter":
            scattered = group.reduce_scatter(put(sum(sizes)), sizes)
            return lambda: _listed(scattered.wait(), collective)
        case "all_to_all":
            counts = [sizes[(rank + other) % group.size] for other in range(group.size)]
            arrived = group.all_to_all(
                [put(n).flatten() for n in counts], [n * collective.width for n in counts]
            )
            return lambda: [_listed(part, collective) for part in arrived.wait()]
        case unknown:
            raise ValueError(f"no collective is called {unknown}")


def _listed(result: Tensor, collective: Collective) -> list[Any]:
    assert result.dtype == DTYPES[collective.dtype]
    numbers: list[Any] = result.float().tolist()
    return numbers
