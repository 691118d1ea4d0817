"""The engine's process: obeys between steps, steps while there is work, tells what each step gave.

It holds the tokens of every request, so that lost ranks cost time and nothing else: they are started
again, and every request goes on from its tokens.

    server --- Add, Abort ---> [orders that have come | a step] --- Stepped ---> server

It ends when the server does: by its order, or because a closed descriptor says that it has gone. Knows
no text, no HTTP and no event loop.
"""

import gc
import itertools
import selectors
import signal
import socket
import sys
import threading
from collections import deque
from collections.abc import Sequence

from kvspan.clock import Clock, WallClock
from kvspan.config.engine import EngineConfig
from kvspan.engine.build import START_TIMEOUT_S, make_executor, resolve_engine, tokenizer_place
from kvspan.engine.core import EngineCore
from kvspan.engine.heartbeat import Heart
from kvspan.engine.messages import (
    Abort,
    Add,
    Begin,
    Begun,
    Chosen,
    CollectiveTime,
    Died,
    End,
    Idle,
    Look,
    Order,
    Profiled,
    Ready,
    Recovered,
    Recovering,
    Report,
    Seen,
    Stepped,
    decode_order,
    encode,
)
from kvspan.engine.restarts import Restarts
from kvspan.errors import EngineDeadError, KvspanError, LateError
from kvspan.executor.crew import Inbox
from kvspan.executor.zygote import tie_to_parent
from kvspan.sampling.grammar import Grammars
from kvspan.step import MeasuredExecutor, TimedSpan
from kvspan.worker.loop import TOLD_ERRORS
from kvspan.worker.messages import LENGTH

PROBE_S = 1.0
"""Between looks at whether the ranks of an idle engine are there."""

PROFILE_S = 10.0
"""Between steps whose parts are timed, if that was asked."""

LATE_S = 60.0
"""That a round of the loop may take beside its step: orders, scheduling, masks of forms."""

_READ_BYTES = 1 << 18
_BUFFER_BYTES = 1 << 21  # a server that pauses for a moment must not hold a step up


def main() -> None:
    """Serves the server that started this process, until it goes or says so."""
    sock_fd, lifeline_fd, heart_fd = map(int, sys.argv[1:4])
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the server's business
        signal.signal(ignored, signal.SIG_IGN)
    tie_to_parent(lifeline_fd)
    clock = WallClock()
    heart = Heart(heart_fd, clock)
    heart.start()
    link = Link(socket.socket(fileno=sock_fd))
    try:
        begin, *more = link.orders(wait_s=None)
        assert isinstance(begin, Begin), "the first order is to begin"
        if not more:  # else it is told to end before it has begun: nothing else is said so early
            _serve(link, begin, heart, clock)
    except KvspanError as error:
        kinds = (base.__name__ for base in type(error).__mro__ if base.__name__ in TOLD_ERRORS)
        link.tell(Died(next(kinds, EngineDeadError.__name__), str(error)))
        link.flush()
    except ServerGoneError:
        pass


def _serve(link: "Link", begin: Begin, heart: Heart, clock: Clock) -> None:
    asked = EngineConfig.from_mapping(begin.options)
    resolved, tokenizer = resolve_engine(asked)
    link.tell(Chosen(resolved, str(tokenizer_place(asked))))
    grammars = Grammars.of_model(resolved.model_config, tokenizer.to_json if tokenizer else None)
    warming = threading.Thread(target=grammars.warm)  # while the ranks load their weights
    warming.start()
    executor = make_executor(resolved, watched=begin.profile)
    core = EngineCore(resolved, executor, grammars)
    warming.join()
    link.tell(Ready(core.reports, core.plan))
    try:
        Service(core, executor, link, begin, heart=heart, clock=clock).run()
    finally:
        core.shutdown()


class ServerGoneError(Exception):
    """The server has hung up."""


class Link:
    """The engine's end of its connection to the server. Reading and writing never hold a step up.

    Args:
        sock: a connected stream socket.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
        self._sock = sock
        self._inbox = Inbox()
        self._outbox: deque[memoryview] = deque()
        self._selector = selectors.DefaultSelector()
        self._selector.register(sock, selectors.EVENT_READ)

    def orders(self, *, wait_s: float | None) -> list[Order]:
        """The orders that have come.

        Args:
            wait_s: how long for one, if there is none; None = as long as it takes.

        Raises:
            ServerGoneError: nobody is left to serve.
        """
        found: list[Order] = []
        while not found:
            self._send()
            if wait_s != 0:
                events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._outbox else 0)
                self._selector.modify(self._sock, events)
                self._selector.select(wait_s)
            found += map(decode_order, self._inbox.feed(self._read()))
            if wait_s is not None:
                break
        return found

    def tell(self, report: Report) -> None:
        """Sends a report, or keeps what the socket does not take for later.

        Raises:
            ServerGoneError: nobody is left to tell.
        """
        body = encode(report)
        self._outbox.append(memoryview(LENGTH.pack(len(body)) + body))
        self._send()

    def flush(self) -> None:
        """Waits until everything is sent."""
        self._sock.setblocking(True)
        self._send()

    def _read(self) -> bytes:
        """All bytes that are there."""
        chunks = []
        try:
            while data := self._sock.recv(_READ_BYTES):
                chunks.append(data)
        except BlockingIOError:
            return b"".join(chunks)
        except OSError as error:
            raise ServerGoneError from error
        raise ServerGoneError

    def _send(self) -> None:
        try:
            while self._outbox:
                sent = self._sock.send(self._outbox[0])
                self._outbox[0] = self._outbox[0][sent:]
                if not self._outbox[0]:
                    self._outbox.popleft()
        except BlockingIOError:
            return
        except OSError as error:
            raise ServerGoneError from error


class Service:
    """The loop of an engine's process.

    Args:
        core: its ranks have been started.
        executor: of the core.
        link: to the server.
        begin: what was asked.
        heart: beats while the loop is in time.
        clock: for the length of steps, and for the window of restarts.
    """

    def __init__(
        self,
        core: EngineCore,
        executor: MeasuredExecutor,
        link: Link,
        begin: Begin,
        *,
        heart: Heart,
        clock: Clock,
    ) -> None:
        self._core, self._executor, self._link = core, executor, link
        self._heart, self._clock = heart, clock
        self._restarts = Restarts(begin.max_restarts, clock)
        self._profile = begin.profile
        self._profiled_s = self._clock.now_s()
        self._longest_step_s = 0.0

    def run(self) -> None:
        """Serves until the server says `End` or hangs up.

        Raises:
            EngineDeadError: ranks were lost, and restarts have run out.
            ServerGoneError: the server has hung up.
        """
        round_s = self._core.resolved.step_timeout_s + LATE_S
        gc.freeze()  # what is there will stay: to go through it takes longer than a step
        while True:
            self._heart.expect(round_s)
            had_work = self._core.has_work
            orders = self._link.orders(wait_s=0.0 if had_work else PROBE_S)
            for order in orders:
                if isinstance(order, End):
                    return
                self._obey(order)
            try:
                if self._core.has_work:
                    self._step()
                elif not orders:
                    self._executor.probe()
            except EngineDeadError as loss:
                self._recover(loss)
            if had_work and not self._core.has_work:
                self._link.tell(Idle(self._core.load))

    def _obey(self, order: Order) -> None:
        match order:
            case Add():
                if order.params.structured_outputs is not None:
                    self._begins((order.request_id,))  # a library makes of it what it can
                self._core.take(order)
            case Look():
                self._link.tell(Seen(self._core.look(), self._core.stats))
            case Abort():
                for request_id in order.request_ids:
                    self._core.end(request_id)

    def _step(self) -> None:
        started_s = self._clock.now_s()
        profiled = self._profile and started_s - self._profiled_s >= PROFILE_S
        if profiled:
            self._executor.watch(True)
        started_s = self._clock.now_s()
        events = self._core.step(self._begins)
        step_s = self._clock.now_s() - started_s
        self._longest_step_s = max(self._longest_step_s, step_s)
        self._link.tell(Stepped(tuple(events), self._core.stats, self._core.load, step_s))
        if profiled:
            self._profiled_s = started_s
            spans = self._executor.watch(False)
            self._link.tell(Profiled(parts_of(spans), step_s, collectives_of(spans)))

    def _begins(self, request_ids: tuple[int, ...]) -> None:
        self._link.tell(Begun(request_ids))

    def _recover(self, loss: EngineDeadError) -> None:
        """Starts the ranks again, if need be several times.

        Raises:
            EngineDeadError: it has been tried often enough.
        """
        while self._restarts.take():
            self._link.tell(Recovering(str(loss)))
            self._heart.expect(2 * START_TIMEOUT_S + LATE_S)  # to load, and to allocate the cache
            self._executor = make_executor(self._core.resolved, watched=self._profile)
            try:
                self._core.revive(self._executor)
            except EngineDeadError as again:
                loss = again
            else:
                self._link.tell(Recovered())
                return
        raise self._given_up(loss)

    def _given_up(self, loss: EngineDeadError) -> EngineDeadError:
        """The same, and what else there is to do about it than to start the ranks again."""
        told = f"{loss} Its ranks are not started again: {self._restarts.why_none}."
        if not isinstance(loss, LateError):
            return EngineDeadError(told)
        seen = "none was in time"
        if self._longest_step_s:
            seen = f"the longest that was in time took {self._longest_step_s:.3g} s"
        return LateError(
            f"{told} Steps may take more than --step-timeout {self._core.resolved.step_timeout_s:g} "
            f"({seen}): raise it."
        )


def parts_of(spans: Sequence[Sequence[TimedSpan]]) -> dict[str, float]:
    """Seconds by part, a mean over the ranks.

    Args:
        spans: of each rank.
    """
    found: dict[str, float] = {}
    for span in itertools.chain.from_iterable(spans):
        found[span.name] = found.get(span.name, 0.0) + span.own_s / len(spans)
    return found


def collectives_of(spans: Sequence[Sequence[TimedSpan]]) -> tuple[CollectiveTime, ...]:
    """What each rank spent on each kind of collective that moved anything.

    Args:
        spans: of each rank.
    """
    found: dict[tuple[int, str, str], tuple[float, int]] = {}
    for rank, own in enumerate(spans):
        for span in own:
            key = rank, span.group, span.op
            seconds, sent_bytes = found.get(key, (0.0, 0))
            found[key] = seconds + span.own_s, sent_bytes + span.sent_bytes
    return tuple(
        CollectiveTime(*key, seconds, sent_bytes)
        for key, (seconds, sent_bytes) in found.items()
        if sent_bytes
    )


if __name__ == "__main__":
    main()
