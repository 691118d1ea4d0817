"""One engine in a process of its own, as an event loop sees it: started, spoken to, started again.

Knows messages and the streams that wait for them. Knows no HTTP, and of processes that they end.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvspan.clock import Clock
from kvspan.engine.events import EngineLoad, EngineStats
from kvspan.engine.health import Health
from kvspan.engine.held import Held, going_on
from kvspan.engine.messages import (
    Abort,
    Add,
    Begin,
    Begun,
    Chosen,
    Died,
    End,
    Idle,
    Look,
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
from kvspan.engine.process import EngineProcess
from kvspan.engine.restarts import Restarts
from kvspan.engine.stream import RequestStream
from kvspan.errors import EngineDeadError, KvspanError
from kvspan.worker.loop import TOLD_ERRORS

ENGINE_TIMEOUT_S = 60.0
"""Silence after which an engine's process counts as hung, if nobody says. It beats twice a second."""

logger = logging.getLogger("kvspan.engine")

_END_S = 10.0  # that an engine gets to end in; its ranks get five seconds of them


@dataclass(frozen=True, slots=True, kw_only=True)
class Care:
    """How an engine's process is looked after.

    Args:
        max_restarts: how often lost ranks, and a lost process, are started again in ten minutes.
        engine_timeout_s: silence after which the process counts as hung, and is killed.
        profile: whether a step is taken apart now and then.
        environment: of the process; None = that of this one.
    """

    max_restarts: int
    engine_timeout_s: float = ENGINE_TIMEOUT_S
    profile: bool = False
    environment: Mapping[str, str] | None = None


class Replica:
    """An engine's process and the requests that it works on.

    Args:
        options: of `EngineConfig`, those that were asked.
        care: how the process is looked after.
        clock: for restarts, and for silence.
        meter: keeps the metrics.
        name: among the replicas, for metrics.
        begun: called whenever its process has begun, with an empty cache.
        freed: called whenever it works and may have more places than before.
        left: called with a request of a process that is lost, the orders of its outputs that go on, and
            whether they may wait for a place here; whether somebody else works on it now.
    """

    def __init__(
        self,
        options: Mapping[str, Any],
        care: Care,
        *,
        clock: Clock,
        meter: Meter,
        name: str = "0",
        begun: Callable[[], None] = lambda: None,
        freed: Callable[[], None] = lambda: None,
        left: Callable[[RequestStream, Sequence[Add], bool], bool] = lambda *_: False,
    ) -> None:
        self._begin = Begin(dict(options), care.max_restarts, care.profile)
        self._care, self._clock, self._meter, self._name = care, clock, meter, name
        self._begun, self._freed, self._left = begun, freed, left
        self.health = Health()
        self.chosen: Chosen | None = None
        self.ready: Ready | None = None
        self._held = Held()
        self._process: EngineProcess | None = None
        self._connected = False
        self._news: asyncio.Queue[Chosen | Ready | KvspanError] = asyncio.Queue()
        self._seen: asyncio.Future[Seen] | None = None
        self._restarts = Restarts(care.max_restarts, clock)
        self._restarting: asyncio.Task[None] | None = None
        self._died: Died | None = None

    @property
    def pid(self) -> int | None:
        """Of its process."""
        return None if self._process is None else self._process.pid

    @property
    def takes_requests(self) -> bool:
        """Whether there is a process to work on them, if need be when its ranks are there again."""
        return self._connected and self.ready is not None

    @property
    def is_returning(self) -> bool:
        """Whether its process is being started again: what it is given meanwhile waits for it."""
        return self._restarting is not None and not self._restarting.done() and not self.health.gone

    @property
    def num_prompt_tokens(self) -> int:
        """Of its unfinished requests: about what they have in its cache."""
        return sum(len(s.generation.prompt_ids) for s in self._held.streams)

    @property
    def num_unfinished(self) -> int:
        """Outputs that it works on, or will."""
        return len(self._held)

    async def start(self, told: Callable[[Chosen], None] = lambda _: None) -> Ready:
        """Starts the process, and returns when it can serve.

        Args:
            told: called with what will run, before the ranks are started.

        Raises:
            KvspanError: what the engine refused, as the class it was.
            EngineDeadError: its process has ended without a word.
        """
        self._died = None
        self._news = asyncio.Queue()  # what a lost process had still to say concerns nobody
        self._process = EngineProcess(
            environment=self._care.environment,
            patience_s=self._care.engine_timeout_s,
            clock=self._clock,
            heard=self.take,
            lost=self.lost,
        )
        await self._process.connect()
        self._connected = True
        self._process.tell(self._begin)
        chosen = await self._hear()
        assert isinstance(chosen, Chosen), "the first report is what was chosen"
        self.chosen = chosen
        told(chosen)
        ready = await self._hear()
        assert isinstance(ready, Ready), "the second report is that ranks are ready"
        if not self._connected:  # it was lost with its last word, and the next news say why
            await self._hear()
        self.ready = ready
        self._meter.counted(self._name, EngineStats())  # a rate needs to see counters at 0 first
        self._show_idle()
        self._begun()
        self.health.ready, self.health.why = True, ""
        return ready

    def add(self, stream: RequestStream, orders: Sequence[Add]) -> None:
        """Gives the engine a request, one order for each of its outputs, now or when it is back.

        Args:
            stream: of the request.
            orders: for the engine.

        Raises:
            EngineDeadError: the process is not there, and will not be.
        """
        bodies = [encode(order) for order in orders]  # all, before the first one is sent
        if not self.is_returning:
            self._send(bodies)
        self._held.add(stream, orders)

    def go_on(self, stream: RequestStream, orders: Sequence[Add]) -> None:
        """Gives the engine a request that another one was lost with, to go on from its tokens.

        Args:
            stream: of the request.
            orders: of its outputs that have not ended, as the first engine got them.

        Raises:
            EngineDeadError: the process is not there.
        """
        self._send([encode(going_on(order, stream.generation)) for order in orders])
        self._held.add(stream, orders)

    @property
    def stranded(self) -> list[tuple[RequestStream, list[Add]]]:
        """Requests that wait for its process, which is being started again.

        Each with the orders of its outputs that have not ended, as the first engine got them.
        """
        if self.takes_requests or not self.is_returning:
            return []
        return [(stream, self._held.orders_of(stream)) for stream in self._held.streams]

    def hand_over(self, stream: RequestStream) -> None:
        """Parts with a request that waits for its process: another one has it."""
        assert not self.takes_requests, "the process knows nothing of it"
        self._held.drop(stream)

    def refuse_if_gone(self) -> None:
        """Refuses when there is no process to work on a request, and will be none.

        Raises:
            EngineDeadError: says why.
        """
        if not self.is_returning:
            self._working()

    def abort(self, request_ids: Sequence[int]) -> None:
        """Ends requests at any moment; their blocks are free before the next step."""
        mine = tuple(i for i in request_ids if self._held.forget(i))
        if mine and self.takes_requests and self._process is not None:
            self._process.tell(Abort(mine))
            self._freed()

    async def look(self) -> Seen:
        """What the engine looks like, between two steps; those who look at once see the same.

        Raises:
            EngineDeadError: the process is not there, or has ended before it said anything.
        """
        process = self._working()
        if self._seen is None or self._seen.done():
            self._seen = asyncio.get_running_loop().create_future()
            process.tell(Look())
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
        if self._connected and self._process is not None:
            self._process.tell(End())
        await self._reap(_END_S)
        self._end_streams(EngineDeadError(self.health.why))

    def take(self, body: bytes) -> None:
        """Takes in a report."""
        report = decode_report(body)
        match report:
            case Stepped():
                self._deal_out(report)
            case Begun(request_ids):
                self._held.begin(request_ids)
            case Profiled():
                self._meter.profiled(self._name, report)
            case Idle(load):
                self.health.load = load
                self._show(load)
            case Chosen() | Ready():
                self._news.put_nowait(report)
            case Seen():
                if self._seen is not None and not self._seen.done():
                    self._seen.set_result(report)
            case Recovering(why):
                self.health.ready, self.health.why = False, f"{why} Its ranks are being started again."
                self.health.restarts += 1
                self._tell(self.health.why)
            case Recovered():
                self._begun()
                self.health.ready, self.health.why = True, ""
                self._tell("Its ranks work again.")
                self._freed()
            case Died():
                self._died = report

    def lost(self, why: str) -> None:
        """The process has hung up, and is started again unless it was told to end.

        Its requests go on at another one, now or when that has a place, or here when it works again.
        They end with an error if it worked on them, as one that was lost before had, and they have had
        nothing in between, or if it has said itself that it has given up and there is no other.

        Args:
            why: a sentence, if it has not said one itself.
        """
        self._connected = False
        self._show_idle()
        told = self._died or Died(EngineDeadError.__name__, why)
        error = TOLD_ERRORS.get(told.kind, EngineDeadError)(told.sentence)
        if self.ready is None:
            self._news.put_nowait(error)
        if self._seen is not None and not self._seen.done():
            self._seen.set_exception(error)
            self._seen.exception()
        if self._restarting is not None and not self._restarting.done():
            return  # a restart has failed, and whoever tries knows
        if self.health.gone:
            self._end_streams(EngineDeadError(self.health.why))
            return
        self.health.ready, self.health.why = False, str(error)
        if self.ready is None:  # it has never served
            self.health.gone = True
            return
        self._leave(error, self._held.orders_after_a_loss, may_wait=self._died is None)
        self.ready = None
        self._restarting = asyncio.get_running_loop().create_task(self._restart())

    def _tell(self, sentence: str) -> None:
        """What whoever reads the log has to know."""
        logger.warning("Engine %s: %s", self._name, sentence)

    def _working(self) -> EngineProcess:
        if not self.takes_requests or self._process is None:
            raise EngineDeadError(self.health.why)
        return self._process

    async def _hear(self) -> Chosen | Ready:
        news = await self._news.get()
        if isinstance(news, KvspanError):
            raise news
        return news

    def _deal_out(self, step: Stepped) -> None:
        """Gives each stream what the step gave it, in one piece."""
        self.health.load, self.health.stats = step.load, step.stats
        touched: dict[RequestStream, None] = {}
        enough: list[int] = []
        before = len(self._held)
        now_s = self._meter.now_s()
        for event in step.events:
            stream = self._held.stream_of(event.request_id)
            if stream is None:
                continue  # aborted while the step ran
            touched[stream] = None
            timing = stream.timings[event.request_id]
            self._meter.took(timing, event, step.step_s, now_s)
            if (reason := stream.take(event)) is not None:
                self._held.forget(event.request_id)  # unless a failure has ended the whole request
                output = stream.generation.outputs[event.request_id]
                self._meter.ended(timing, reason, output.num_tokens)
                if event.finish_reason is None:  # a stop string, which the engine knows nothing of
                    enough.append(event.request_id)
        if enough and self._process is not None:
            self._process.tell(Abort(tuple(enough)))
        for stream in touched:
            stream.wake()
        self._meter.stepped(self._name, step)
        self._show(step.load)
        if len(self._held) < before:
            self._freed()

    def _show_idle(self) -> None:
        """What a lost process was busy with is nothing now: whoever counts places would wait for it."""
        pools = () if self.chosen is None else (0,) * self.chosen.resolved.cache_layout.num_pools
        self.health.load = EngineLoad(0, 0, pools)
        if self.ready is not None:
            self._show(self.health.load)

    def _show(self, load: EngineLoad) -> None:
        assert self.chosen is not None, "it has begun"
        assert self.ready is not None, "it has begun"
        blocks = self.ready.plan.blocks_per_rank
        self._meter.loaded(self._name, load, self.chosen.resolved, blocks)

    def _send(self, bodies: Sequence[bytes]) -> None:
        process = self._working()
        for body in bodies:
            process.send(body)

    def _leave(
        self,
        error: KvspanError,
        orders_of: Callable[[RequestStream], list[Add]],
        *,
        may_wait: bool,
    ) -> None:
        """Parts with the requests of a lost process, but for those that wait for the next one.

        Args:
            error: for those that end.
            orders_of: a request -> its orders that another engine may have.
            may_wait: whether any may.
        """
        for stream in self._held.in_line:
            orders = orders_of(stream)
            is_elsewhere = bool(orders) and self._left(stream, orders, may_wait)
            if orders and may_wait and not is_elsewhere:
                self._held.add(stream, orders)
                continue
            self._held.drop(stream)
            if not is_elsewhere:
                stream.fail(error)

    def _end_streams(self, error: KvspanError) -> None:
        streams, self._held = self._held.streams, Held()
        for stream in streams:
            stream.fail(error)

    async def _restart(self) -> None:
        """Starts the process again, if need be several times."""
        while self._restarts.take():
            self.health.restarts += 1
            self._tell(f"{self.health.why} The engine is being started again.")
            await self._reap(0.0)
            try:
                await self.start()
            except KvspanError as error:
                self.health.why = str(error)
            except OSError as error:  # no memory or no file is left for a process: there may be later
                self.health.why = f"The engine's process could not be started: {error}."
            else:
                self._send(list(map(encode, self._held.orders)))  # they have waited for it
                self._tell("It works again.")
                self._freed()
                return
        self.health.gone = True
        # None of them was with an engine since: those that have waited may all go to another one.
        self._leave(EngineDeadError(self.health.why), self._held.orders_of, may_wait=False)
        self._tell(f"{self.health.why} The engine is not started again: {self._restarts.why_none}.")

    async def _reap(self, patience_s: float) -> None:
        process, self._process = self._process, None
        if process is not None:
            await process.end(patience_s)
