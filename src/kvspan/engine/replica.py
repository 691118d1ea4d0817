"""One engine in a process of its own, as an event loop sees it: started, spoken to, started again.

Knows processes, messages and the streams that wait for them. Knows no HTTP.
"""

import asyncio
import itertools
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from kvspan.clock import Clock
from kvspan.engine.core import EngineLoad, EngineStats
from kvspan.engine.messages import (
    Abort,
    Add,
    Begin,
    Chosen,
    Died,
    End,
    Idle,
    Look,
    Order,
    Profiled,
    Ready,
    Recovered,
    Recovering,
    Seen,
    Stepped,
    decode_report,
    encode,
)
from kvspan.engine.meter import Meter
from kvspan.engine.restarts import Restarts
from kvspan.engine.stream import RequestStream
from kvspan.errors import EngineDeadError, KvspanError
from kvspan.executor.crew import Inbox
from kvspan.worker.loop import TOLD_ERRORS
from kvspan.worker.messages import LENGTH

_END_S = 10.0  # that an engine gets to end in; its ranks get five seconds of them
_BUFFER_BYTES = 1 << 21


@dataclass(slots=True)
class Health:
    """What a replica tells of itself.

    Args:
        ready: whether it works on requests now.
        why: a sentence for when it does not.
        gone: whether it will not work again.
        restarts: times that its ranks or its process were started again.
        load: after the last step.
        stats: counters after the last step, since its process was started.
    """

    ready: bool = False
    why: str = "The engine is starting."
    gone: bool = False
    restarts: int = 0
    load: EngineLoad = field(default_factory=lambda: EngineLoad(0, 0, ()))
    stats: EngineStats = field(default_factory=EngineStats)


def together(healths: Sequence[Health]) -> Health:
    """What several replicas tell of themselves: ready if one is, gone if all are."""
    loads, stats = [h.load for h in healths], [h.stats for h in healths]
    return Health(
        ready=any(h.ready for h in healths),
        why=next((h.why for h in healths if h.why), ""),
        gone=all(h.gone for h in healths),
        restarts=sum(h.restarts for h in healths),
        load=EngineLoad(
            num_running=sum(load.num_running for load in loads),
            num_waiting=sum(load.num_waiting for load in loads),
            used_blocks=tuple(itertools.chain.from_iterable(load.used_blocks for load in loads)),
        ),
        stats=EngineStats(
            steps=sum(each.steps for each in stats),
            prompt_tokens=sum(each.prompt_tokens for each in stats),
            cached_tokens=sum(each.cached_tokens for each in stats),
            output_tokens=sum(each.output_tokens for each in stats),
            preemptions=sum(each.preemptions for each in stats),
            exchange_steps=sum(each.exchange_steps for each in stats),
            spills=sum(each.spills for each in stats),
        ),
    )


class Replica:
    """An engine's process and the requests that it works on.

    Args:
        options: of `EngineConfig`, those that were asked.
        max_restarts: how often lost ranks, and a lost process, are started again in ten minutes.
        profile: whether a step is taken apart now and then.
        clock: for restarts.
        meter: keeps the metrics.
        name: among the replicas, for them.
        environment: of its process; None = that of this one.
        begun: called whenever its process has begun, with an empty cache.
    """

    def __init__(
        self,
        options: Mapping[str, Any],
        *,
        max_restarts: int,
        profile: bool,
        clock: Clock,
        meter: Meter,
        name: str = "0",
        environment: Mapping[str, str] | None = None,
        begun: Callable[[], None] = lambda: None,
    ) -> None:
        self._options, self._max_restarts, self._profile = dict(options), max_restarts, profile
        self._meter, self._name = meter, name
        self._environment, self._begun = environment, begun
        self.health = Health()
        self.chosen: Chosen | None = None
        self.ready: Ready | None = None
        self._streams: dict[int, RequestStream] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._wire: _Wire | None = None
        self._news: asyncio.Future[Chosen | Ready] | None = None
        self._seen: asyncio.Future[Seen] | None = None
        self._restarts = Restarts(max_restarts, clock)
        self._restarting: asyncio.Task[None] | None = None
        self._died: Died | None = None

    @property
    def pid(self) -> int | None:
        """Of its process."""
        return None if self._process is None else self._process.pid

    @property
    def takes_requests(self) -> bool:
        """Whether there is a process to work on them, if need be when its ranks are there again."""
        return self._wire is not None and self.ready is not None

    @property
    def num_prompt_tokens(self) -> int:
        """Of its unfinished requests: about what they have in its cache."""
        return sum(len(s.generation.prompt_ids) for s in dict.fromkeys(self._streams.values()))

    @property
    def num_unfinished(self) -> int:
        """Outputs that it works on, or will."""
        return len(self._streams)

    async def start(self, told: Callable[[Chosen], None] = lambda _: None) -> Ready:
        """Starts the process, and returns when it can serve.

        Args:
            told: called with what will run, before the ranks are started.

        Raises:
            KvspanError: what the engine refused, as the class it was.
            EngineDeadError: its process has ended without a word.
        """
        await self._spawn()
        self._tell(Begin(self._options, self._max_restarts, self._profile))
        chosen = await self._hear()
        assert isinstance(chosen, Chosen), "the first report is what was chosen"
        self.chosen = chosen
        told(chosen)
        ready = await self._hear()
        assert isinstance(ready, Ready), "the second report is that ranks are ready"
        self.ready = ready
        self._begun()
        self.health.ready, self.health.why = True, ""
        return ready

    def add(self, stream: RequestStream, orders: Sequence[Add]) -> None:
        """Gives the engine a request, one order for each of its outputs.

        Raises:
            EngineDeadError: the process is not there.
        """
        self.refuse_if_gone()
        assert self._wire is not None, "it takes requests"
        bodies = [encode(order) for order in orders]  # before any of them counts as unfinished
        for order, body in zip(orders, bodies, strict=True):
            self._streams[order.request_id] = stream
            self._wire.send(body)

    def refuse_if_gone(self) -> None:
        """Refuses when there is no process to work on a request.

        Raises:
            EngineDeadError: says why.
        """
        if not self.takes_requests:
            raise EngineDeadError(self.health.why)

    def abort(self, request_ids: Sequence[int]) -> None:
        """Ends requests at any moment; their blocks are free before the next step."""
        mine = tuple(i for i in request_ids if self._streams.pop(i, None) is not None)
        if mine and self._wire is not None:
            self._tell(Abort(mine))

    async def look(self) -> Seen:
        """What the engine looks like, between two steps; those who look at once see the same.

        Raises:
            EngineDeadError: the process is not there, or has ended before it said anything.
        """
        self.refuse_if_gone()
        if self._seen is None or self._seen.done():
            self._seen = asyncio.get_running_loop().create_future()
            self._tell(Look())
        return await asyncio.shield(self._seen)

    def measure(self) -> None:
        """Tells the meter what no step tells."""
        health = self.health
        waiting = max(self.num_unfinished - health.load.num_running, 0)
        self._meter.lives(self._name, ready=health.ready, restarts=health.restarts, num_waiting=waiting)

    async def shutdown(self) -> None:
        """Ends the process and its ranks; a second call does nothing."""
        self.health.ready, self.health.gone = False, True
        self.health.why = "The engine has been shut down."
        if self._restarting is not None:
            self._restarting.cancel()
        if self._wire is not None:
            self._tell(End())
        await self._reap(_END_S)

    async def _spawn(self) -> None:
        ours, theirs = socket.socketpair()
        lifeline_fd, lifeline_end = os.pipe()
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
        arguments = (str(theirs.fileno()), str(lifeline_fd))
        # From this thread: the engine ends with the thread that has started it.
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "kvspan.engine.service", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr if sys.stderr is not None else subprocess.DEVNULL,
            pass_fds=(theirs.fileno(), lifeline_fd),
            env=self._environment,
            process_group=0,  # Ctrl-C at the terminal reaches the server alone
        )
        theirs.close()
        os.close(lifeline_fd)
        self._died = None
        self._news = asyncio.get_running_loop().create_future()
        _, self._wire = await asyncio.get_running_loop().create_unix_connection(
            lambda: _Wire(self, lifeline_end), sock=ours
        )

    async def _hear(self) -> Chosen | Ready:
        assert self._news is not None, "nothing has been asked"
        try:
            return await self._news
        finally:
            self._news = asyncio.get_running_loop().create_future()

    def _tell(self, order: Order) -> None:
        assert self._wire is not None, "nobody is there to be told"
        self._wire.send(encode(order))

    def take(self, body: bytes) -> None:
        """Takes in a report."""
        report = decode_report(body)
        match report:
            case Stepped():
                self._deal_out(report)
            case Profiled():
                self._meter.profiled(self._name, report)
            case Idle(load):
                self.health.load = load
                self._show(load)
            case Chosen() | Ready():
                assert self._news is not None, "it was asked to begin"
                self._news.set_result(report)
            case Seen():
                if self._seen is not None and not self._seen.done():
                    self._seen.set_result(report)
            case Recovering(why):
                self.health.ready, self.health.why = False, f"{why} Its ranks are being started again."
                self.health.restarts += 1
            case Recovered():
                self._begun()
                self.health.ready, self.health.why = True, ""
            case Died():
                self._died = report

    def _deal_out(self, step: Stepped) -> None:
        """Gives each stream what the step gave it, in one piece."""
        self.health.load, self.health.stats = step.load, step.stats
        touched: dict[RequestStream, None] = {}
        enough: list[int] = []
        now_s = self._meter.now_s()
        for event in step.events:
            stream = self._streams.get(event.request_id)
            if stream is None:
                continue  # aborted while the step ran
            touched[stream] = None
            timing = stream.timings[event.request_id]
            self._meter.took(timing, event, step.step_s, now_s)
            if (reason := stream.take(event)) is not None:
                del self._streams[event.request_id]
                output = stream.generation.outputs[event.request_id]
                self._meter.ended(timing, reason, output.num_tokens)
                if event.finish_reason is None:  # a stop string, which the engine knows nothing of
                    enough.append(event.request_id)
        if enough:
            self._tell(Abort(tuple(enough)))
        for stream in touched:
            stream.wake()
        self._meter.stepped(self._name, step)
        self._show(step.load)

    def _show(self, load: EngineLoad) -> None:
        assert self.chosen is not None, "it has begun"
        assert self.ready is not None, "it has begun"
        blocks = self.ready.plan.blocks_per_rank
        self._meter.loaded(self._name, load, self.chosen.resolved, blocks)

    def lost(self) -> None:
        """The process has hung up: streams end, and it is started again unless it was told to end."""
        self._wire = None
        told = self._died or Died(EngineDeadError.__name__, "The engine's process has ended.")
        error = TOLD_ERRORS.get(told.kind, EngineDeadError)(told.sentence)
        if self._news is not None and self.ready is None and not self._news.done():
            self._news.set_exception(error)
            self._news.exception()  # nobody may be waiting
        if self._seen is not None and not self._seen.done():
            self._seen.set_exception(error)
            self._seen.exception()
        if self._restarting is not None and not self._restarting.done():
            return  # a restart has failed, and whoever tries knows
        if self.health.gone:
            self._end_streams(EngineDeadError(self.health.why))
            return
        self.health.ready, self.health.why = False, str(error)
        self._end_streams(error)
        if self.ready is None:  # it has never served
            self.health.gone = True
            return
        self.ready = None
        self._restarting = asyncio.get_running_loop().create_task(self._restart())

    def _end_streams(self, error: KvspanError) -> None:
        streams = dict.fromkeys(self._streams.values())
        self._streams.clear()
        for stream in streams:
            stream.fail(error)

    async def _restart(self) -> None:
        """Starts the process again, if need be several times."""
        while self._restarts.take():
            self.health.restarts += 1
            await self._reap(0.0)
            try:
                await self.start()
            except KvspanError as error:
                self.health.why = str(error)
            else:
                return
        self.health.gone = True

    async def _reap(self, patience_s: float) -> None:
        """Waits for the process to end, and kills it if it does not."""
        process, self._process = self._process, None
        if process is None:
            return
        loop = asyncio.get_running_loop()
        try:
            await loop.run_in_executor(None, lambda: process.wait(patience_s))
        except subprocess.TimeoutExpired:
            process.kill()
            await loop.run_in_executor(None, process.wait)
        if self._wire is not None:
            self._wire.close()


class _Wire(asyncio.Protocol):
    """The server's end of the connection. Closed, it lets go of the engine, which ends then.

    Args:
        replica: whose it is.
        lifeline_end: the end to write of the pipe that the engine watches.
    """

    def __init__(self, replica: Replica, lifeline_end: int) -> None:
        self._replica, self._lifeline_end = replica, lifeline_end
        self._inbox = Inbox()
        self._transport: asyncio.WriteTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)  # uvloop's is none by its class

    def data_received(self, data: bytes) -> None:
        for body in self._inbox.feed(data):
            self._replica.take(body)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 (it ends either way)
        os.close(self._lifeline_end)
        self._replica.lost()

    def send(self, body: bytes) -> None:
        assert self._transport is not None, "it is connected by now"
        self._transport.write(LENGTH.pack(len(body)) + body)

    def close(self) -> None:
        assert self._transport is not None, "it is connected by now"
        self._transport.close()
