"""What a rank's process runs: meet the other ranks, build the worker, obey until the driver hangs up."""

import msgspec
import torch

from kvspan.comm.connect import join
from kvspan.config.resolved import Resolved
from kvspan.worker.loop import serve
from kvspan.worker.messages import Channel
from kvspan.worker.worker import Worker, rank_device


class RankStart(msgspec.Struct, frozen=True):
    """What every rank's process is told first, the same for all.

    Args:
        resolved: what will run.
        store_path: the path that the ranks meet at.
        watched: whether they can say where their time goes.
    """

    resolved: Resolved
    store_path: str
    watched: bool = False


def run(channel: Channel, payload: bytes, rank: int) -> None:
    """Target of a rank's process.

    Args:
        channel: to the driver.
        payload: a msgpack `RankStart`.
        rank: of this process.

    Whatever it raises is told to the driver by the fork-server, which calls it.
    """
    start = msgspec.msgpack.decode(payload, type=RankStart)
    resolved = start.resolved
    device = rank_device(resolved.device, rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    world = join(
        resolved.comm,
        rank=rank,
        size=resolved.topology.world_size,
        store_path=start.store_path,
        # A little more than the driver waits, so that it is the driver who says what happened.
        timeout_s=resolved.step_timeout_s + 60,
        device=device,
    )
    serve(channel, Worker(resolved, world, watched=start.watched), rank)
    world.close()
