"""The live page: its files, and what it shows, a few times a second and only while somebody looks.

Everything that it shows is a count since the start or the state of this moment; rates and lines are made
in the browser. Knows no engine but through `AsyncLLM.look`.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from importlib import resources
from typing import Any

import msgspec
from fastapi import APIRouter, HTTPException, Request, Response

from kvspan.clock import unix_s
from kvspan.config.resolved import Resolved
from kvspan.engine.snapshot import PoolView, Snapshot
from kvspan.metrics import Histogram
from kvspan.server.served import Served, served
from kvspan.server.sse import EventStream, event

LOOK_S = 0.25
"""Between two looks, however many watch: short enough for the eye, and nothing to an engine."""

PATIENCE_S = 2.0
"""For an engine that is busy with one long step, or with starting its ranks again."""

KINDS = {
    "style.css": "text/css",
    "icon.svg": "image/svg+xml",
    **dict.fromkeys(("main.js", "line.js", "ranks.js", "requests.js", "chat.js"), "text/javascript"),
}
"""The page's files and their media types."""

_SAFETY = {
    "Content-Security-Policy": "default-src 'self'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}

router = APIRouter(include_in_schema=False)


@router.get("/")
async def page() -> Response:
    """The page."""
    return _file("index.html", "text/html")


@router.get("/live/feed")
async def feed(request: Request) -> Response:
    """What the page shows, as events."""
    watch: Watch = request.app.state.watch
    gone = asyncio.Event()
    return EventStream(_looks(served(request), watch, gone), on_gone=gone.set)


@router.get("/live/{name}")
async def file(name: str) -> Response:
    """A file of the page."""
    if name not in KINDS:
        raise HTTPException(404, f"The live page has no file {name!r}.")
    return _file(name, KINDS[name])


async def _looks(here: Served, watch: "Watch", gone: asyncio.Event) -> AsyncIterator[bytes]:
    """A look every `LOOK_S`, until the reader goes away or the server, with nothing left to do, ends."""
    while not (gone.is_set() or (here.draining and not here.llm.num_unfinished)):
        yield event(await watch.look(here))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(gone.wait(), LOOK_S)


class Watch:
    """One look at a time, shared by everybody who watches."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._shown: dict[str, Any] = {}
        self._at_s = 0.0

    async def look(self, here: Served) -> dict[str, Any]:
        """What the page shows; at most `LOOK_S` old, or the engine was asked just now."""
        async with self._lock:
            if not 0 <= unix_s() - self._at_s < LOOK_S / 2:
                self._shown, self._at_s = await _look(here), unix_s()
            return self._shown


async def _look(here: Served) -> dict[str, Any]:
    seen = await here.llm.look(patience_s=PATIENCE_S)
    health, resolved = here.llm.health, here.llm.resolved
    topology = resolved.topology
    return {
        "at": unix_s(),
        "model": here.names[0],
        "ready": health.ready and not here.draining,
        "gone": health.gone,
        "why": "The server is about to end." if here.draining else health.why,
        "layout": {
            "num_replicas": len(seen),
            "tp_size": topology.tp_size,
            "dcp_size": topology.dcp_size,
            "pcp_size": topology.pcp_size,
            "block_size": resolved.block_size,
            "kv_dtype": resolved.kv_dtype,
            "max_model_len": resolved.max_model_len,
        },
        "replicas": [{"ready": each.ready, "why": each.why} for each in here.llm.healths],
        "stats": msgspec.structs.asdict(health.stats),
        **side_by_side([None if each is None else each.snapshot for each in seen], resolved),
        "ttft": _spread(here, "kvspan_time_to_first_token_seconds"),
        "tpot": _spread(here, "kvspan_inter_token_latency_seconds"),
    }


def side_by_side(snapshots: Sequence[Snapshot | None], resolved: Resolved) -> dict[str, Any]:
    """Replicas as one picture: the ranks and pools of each after those of the one before.

    Args:
        snapshots: one a replica; None = it has not told anything, and shows no blocks.
        resolved: what runs in each.
    """
    topology, num_pools = resolved.topology, resolved.cache_layout.num_pools
    nothing = Snapshot([PoolView(0, 0, 0, 1, [])] * num_pools, [], 0)
    told = [each or nothing for each in snapshots]
    return {
        "ranks": [
            {
                "replica": replica,
                "rank": rank,
                "pool": replica * num_pools + topology.dcp_rank(rank) % num_pools,
            }
            for replica in range(len(told))
            for rank in range(topology.world_size)
        ],
        "pools": [pool for each in told for pool in each.pools],
        "requests": [
            msgspec.structs.replace(request, blocks_by_pool=[0] * (replica * num_pools) + held)
            for replica, each in enumerate(told)
            for request in each.requests
            for held in (request.blocks_by_pool,)
        ],
        "num_requests": sum(each.num_requests for each in told),
    }


def _spread(here: Served, name: str) -> dict[str, float]:
    """Sum and count of a histogram."""
    found = next(m for m in here.llm.meter.registry if m.name == name)
    assert isinstance(found, Histogram), f"{name} is no histogram"
    return {"sum": found.distribution.total, "count": sum(found.distribution.counts)}


def _file(name: str, kind: str) -> Response:
    body = resources.files(__package__).joinpath(name).read_bytes()
    return Response(body, media_type=kind, headers=_SAFETY)
