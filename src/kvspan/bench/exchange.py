"""How long ranks of this host take to exchange: every transport in turn, in the same processes.

    called    what rank 0 sees from the start of a collective to its result, everybody's waiting included
    played    a collective's share of a block of them on a tape, as in steps that are played

All alternate in blocks of rounds, so that a noisy moment meets all of them.
"""

import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import msgspec
import torch

from kvspan.attention.exchange import make_exchange
from kvspan.clock import WallClock
from kvspan.comm.connect import join
from kvspan.comm.group import Group, Piece
from kvspan.errors import EngineDeadError
from kvspan.executor.children import Child, fork_server
from kvspan.topology import cut
from kvspan.worker.messages import Channel, Failed, decode_answer
from kvspan.worker.tape import Scratch, Tape

COMMS = ("shm", "gloo")
OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "merge")
NUM_HEADS, HEAD_DIM = 8, 64
_DTYPE = torch.bfloat16
_BLOCK_ROUNDS = 20
_TIMEOUT_S = 60.0


class Plan(msgspec.Struct, frozen=True):
    """What is measured.

    Args:
        num_ranks: processes, one thread each.
        sizes_bytes: what a rank puts in; of a merge, the partial outputs without their LSEs.
        num_rounds: of each operation, size and transport.
        meeting_paths: transport -> the path that its ranks meet at.
    """

    num_ranks: int
    sizes_bytes: tuple[int, ...]
    num_rounds: int
    meeting_paths: dict[str, str]


class Timing(msgspec.Struct, frozen=True):
    """One line of the result; of what was played, a time is the mean of a block of rounds."""

    op: str
    size_bytes: int
    comm: str
    played: bool
    median_us: float
    p99_us: float


def measure(
    num_ranks: int, sizes_bytes: Sequence[int], num_rounds: int, *, over: Sequence[str] = COMMS
) -> list[Timing]:
    """Starts ranks and measures every operation; what goes over shared memory is also played.

    Args:
        num_ranks: processes.
        sizes_bytes: what a rank puts in.
        num_rounds: of each operation, size and transport.
        over: transports.

    Raises:
        EngineDeadError: a rank failed.
    """
    server = fork_server()
    paths = {comm: server.private_path() for comm in over}
    payload = msgspec.msgpack.encode(Plan(num_ranks, tuple(sizes_bytes), num_rounds, paths))
    children = [
        server.fork("kvspan.bench.exchange:run_rank", rank=rank, num_threads=1)
        for rank in range(num_ranks)
    ]
    try:
        for child in children:
            Channel(child.channel).send(payload)
        return _timings(children[0])
    finally:
        for child in children:
            child.kill()
            child.close()


def run_rank(channel: Channel, payload: bytes, rank: int) -> None:
    """Target of a rank's process: measures, and sends its timings."""
    plan = msgspec.msgpack.decode(payload, type=Plan)
    worlds = {
        comm: join(comm, rank=rank, size=plan.num_ranks, store_path=path, timeout_s=_TIMEOUT_S)
        for comm, path in plan.meeting_paths.items()
    }
    groups = {comm: world.group([range(plan.num_ranks)]) for comm, world in worlds.items()}
    timings = [
        timing for op in OPS for size in plan.sizes_bytes for timing in _measure(op, size, groups, plan)
    ]
    for world in worlds.values():
        world.close()
    if rank == 0:
        channel.send(msgspec.msgpack.encode(timings))


def _timings(child: Child) -> list[Timing]:
    body = Channel(child.channel).receive()
    if body is None:
        raise EngineDeadError(f"Rank {child.rank} died while it measured.")
    try:
        return msgspec.msgpack.decode(body, type=list[Timing])
    except msgspec.ValidationError:
        failed = decode_answer(body)
        assert isinstance(failed, Failed)
        raise EngineDeadError(f"Rank {failed.rank} failed: {failed.sentence}") from None


@torch.inference_mode()
def _measure(op: str, size_bytes: int, groups: Mapping[str, Group], plan: Plan) -> list[Timing]:
    clock = WallClock()
    calls = {comm: _call(op, size_bytes, group) for comm, group in groups.items()}
    took_us: dict[tuple[str, bool], list[float]] = defaultdict(list)
    for call in calls.values():
        call()  # memory is touched, connections are made
    blocks = {comm: _on_tape(call) for comm, call in calls.items() if comm == "shm"}

    def now_us() -> float:
        return clock.now_s() * 1e6

    for begin in range(0, plan.num_rounds, _BLOCK_ROUNDS):
        for comm, call in calls.items():
            for _ in range(min(_BLOCK_ROUNDS, plan.num_rounds - begin)):
                start_us = now_us()
                call()
                took_us[comm, False].append(now_us() - start_us)
        for comm, tape in blocks.items():
            start_us = now_us()
            tape.play()
            took_us[comm, True].append((now_us() - start_us) / _BLOCK_ROUNDS)
    return [
        Timing(op, size_bytes, *how, statistics.median(us), sorted(us)[int(0.99 * (len(us) - 1))])
        for how, us in took_us.items()
    ]


def _on_tape(call: Callable[[], object]) -> Tape:
    """A block of rounds, to be played."""

    def block() -> torch.Tensor:
        for _ in range(_BLOCK_ROUNDS):
            call()
        return torch.empty(0)

    tape = Tape((), Scratch())
    tape.record(block)
    return tape


def _call(op: str, size_bytes: int, group: Group) -> Callable[[], object]:
    """An operation to which each rank brings about `size_bytes`."""
    size, rank = group.size, group.rank
    x = torch.randn(size_bytes // _DTYPE.itemsize).to(_DTYPE)
    sizes = [cut(len(x), parts=size, index=i).size for i in range(size)]
    parts, arriving = x.split_with_sizes(sizes), [sizes[rank]] * size
    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: group.all_reduce(x).wait(),
        "all_gather": lambda: group.all_gather(x, [len(x)] * size).wait(),
        "reduce_scatter": lambda: group.reduce_scatter(x, sizes).wait(),
        "all_to_all": lambda: group.all_to_all(parts, arriving).wait(),
        "merge": _merge(x, group),
    }
    return calls[op]


def _merge(x: torch.Tensor, group: Group) -> Callable[[], object]:
    """What a layer does with its partial attention."""
    out = x.view(-1, NUM_HEADS, HEAD_DIM)
    lse = torch.randn(out.shape[:2])
    width = NUM_HEADS * HEAD_DIM
    columns = [cut(width, parts=group.size, index=i) for i in range(group.size)]
    pieces = [Piece(slice(None), span) for span in columns]
    exchange = make_exchange("a2a", group)
    return lambda: exchange.start(out, lse, pieces).wait()
