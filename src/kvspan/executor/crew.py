"""All ranks of one executor: sends to them without blocking, hears them, notices how they end.

One `select` waits for everything that can happen: bytes from a rank, room for bytes to a rank, a rank's
end. Knows frames and exit codes, and what a rank's end is called in a sentence. Knows no steps.
"""

import contextlib
import os
import selectors
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import psutil

from kvspan.clock import Clock
from kvspan.executor.children import Child
from kvspan.executor.zygote import NUMBER
from kvspan.worker.messages import LENGTH, Answer, Failed, decode_answer

_READ_OR_WRITE = selectors.EVENT_READ | selectors.EVENT_WRITE
_READ_BYTES = 1 << 18
_SETTLE_S = 0.3  # after a first loss: one rank's death makes its neighbours fail, and is the one to name
_LONGEST_SELECT_S = 3600.0  # epoll refuses a few weeks
_KILL_S = 5.0  # that the kernel gets to end killed processes in


class Inbox:
    """Cuts a stream of bytes into the bodies of its frames."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Takes the stream's next bytes.

        Returns:
            The bodies that are complete with them, in order.
        """
        self._bytes += data
        bodies = []
        while len(self._bytes) >= LENGTH.size:
            end = LENGTH.size + LENGTH.unpack_from(self._bytes)[0]
            if len(self._bytes) < end:
                break
            bodies.append(bytes(self._bytes[LENGTH.size : end]))
            del self._bytes[:end]
        return bodies


@dataclass
class _Rank:
    """What is known of one rank.

    Args:
        child: its process.
        outbox: what it has not been sent yet.
        answer: to the last order.
        failed: its last words, if it had an exception.
        hung_up: whether its channel has closed.
        leash_bytes: what the zygote has told: the pid, then the exit code.
        ended: whether its process has ended, which closes the leash.
    """

    child: Child
    inbox: Inbox = field(default_factory=Inbox)
    outbox: list[memoryview] = field(default_factory=list)
    answer: Answer | None = None
    failed: Failed | None = None
    hung_up: bool = False
    leash_bytes: bytes = b""
    ended: bool = False

    @property
    def lost(self) -> bool:
        """Whether it will answer no more."""
        return self.failed is not None or self.hung_up or self.ended

    @property
    def exit_code(self) -> int | None:
        """Of its process, minus the signal for a killed one; None while nobody has told."""
        told = len(self.leash_bytes) >= 2 * NUMBER.size
        return NUMBER.unpack_from(self.leash_bytes, NUMBER.size)[0] if told else None

    @property
    def pid(self) -> int | None:
        """Of its process; None while nobody has told."""
        return NUMBER.unpack_from(self.leash_bytes)[0] if self.leash_bytes else None

    @property
    def stopped(self) -> bool:
        """Whether its process stands still after SIGSTOP or under a debugger."""
        with contextlib.suppress(psutil.Error):
            return self.pid is not None and psutil.Process(self.pid).status() == psutil.STATUS_STOPPED
        return False

    def kill_without_zygote(self) -> None:
        """For a zygote that stands still: it has not reaped the process, so the pid is still its own."""
        if self.pid is not None and not self.ended:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


@dataclass(frozen=True, slots=True)
class Deadline:
    """Until when something has to happen.

    Args:
        at_s: time of the clock.
        means: the same for the user, e.g. "30 s (--step-timeout 30)".
    """

    at_s: float
    means: str


class RankLost(Exception):
    """A rank has ended, failed or not answered in time.

    Args:
        sentence: which, and how.
        failed: the last words of the rank that is to blame, if it had any.
        is_late: whether it may still have been at work when its time was up.
    """

    def __init__(self, sentence: str, failed: Failed | None = None, *, is_late: bool = False) -> None:
        super().__init__(sentence)
        self.sentence = sentence
        self.failed = failed
        self.is_late = is_late


class Crew:
    """The ranks of one executor.

    Args:
        children: their processes, in order of rank.
        clock: for deadlines.
    """

    def __init__(self, children: Sequence[Child], clock: Clock) -> None:
        self._clock = clock
        self._ranks = [_Rank(child) for child in children]
        self._failures: list[Failed] = []  # in the order they were heard
        self._selector = selectors.DefaultSelector()
        for rank in self._ranks:
            for sock, on_event in (
                (rank.child.channel, self._on_channel),
                (rank.child.leash, self._on_leash),
            ):
                sock.setblocking(False)
                self._selector.register(sock, selectors.EVENT_READ, partial(on_event, rank))

    def send(self, body: bytes, deadline: Deadline) -> None:
        """Sends one frame to every rank, and returns when all of it is on its way.

        Args:
            body: of the frame, the same bytes for each.
            deadline: until which the ranks must have taken it.

        Raises:
            RankLost: a rank has ended, or takes nothing.
        """
        frame = memoryview(LENGTH.pack(len(body)) + body)
        for rank in self._ranks:
            rank.outbox.append(frame)  # behind the rest of a frame whose sending was interrupted
            self._flush(rank)
        self._work_until(lambda rank: not rank.outbox, deadline)

    def answers(self, deadline: Deadline) -> list[Answer]:
        """One answer from each rank, in order of rank.

        Args:
            deadline: until which they must have come.

        Raises:
            RankLost: a rank has ended, failed or not answered.
        """
        self._work_until(lambda rank: rank.answer is not None, deadline)
        answers = [rank.answer for rank in self._ranks if rank.answer is not None]
        for rank in self._ranks:
            rank.answer = None
        return answers

    def look(self) -> None:
        """Takes in what has happened meanwhile, and waits for nothing.

        Raises:
            RankLost: a rank has ended or failed.
        """
        for key, events in self._selector.select(0):
            key.data(events)
        if any(rank.lost for rank in self._ranks):
            self.await_end(_SETTLE_S)
            raise self._loss()

    def await_end(self, within_s: float) -> bool:
        """Waits until all ranks have ended; whether they have."""
        give_up_s = self._clock.now_s() + within_s
        while not all(rank.ended for rank in self._ranks):
            if not self._work(give_up_s):
                return False
        return True

    def kill(self) -> None:
        """Ends all ranks at once, stopped ones too, and lets go of them."""
        for rank in self._ranks:
            rank.child.kill()
        if not self.await_end(_KILL_S):
            for rank in self._ranks:
                rank.kill_without_zygote()
        self._selector.close()
        for rank in self._ranks:
            rank.child.close()

    def _work_until(self, ready: Callable[[_Rank], bool], deadline: Deadline) -> None:
        while not all(ready(rank) for rank in self._ranks):
            if any(rank.lost for rank in self._ranks):
                self.await_end(_SETTLE_S)
                raise self._loss()
            if not self._work(deadline.at_s):
                late = [rank for rank in self._ranks if not ready(rank)]
                raise _not_answered(late, deadline)

    def _work(self, until_s: float) -> bool:
        """Waits for events and handles them; False when it is too late for that."""
        left_s = until_s - self._clock.now_s()
        if left_s <= 0:
            return False
        for key, events in self._selector.select(min(left_s, _LONGEST_SELECT_S)):
            key.data(events)
        return True

    def _on_channel(self, rank: _Rank, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            self._flush(rank)
        if events & selectors.EVENT_READ and not rank.hung_up:
            self._read(rank)

    def _flush(self, rank: _Rank) -> None:
        """Sends what the socket takes, and watches for room if that is not all."""
        sock = rank.child.channel
        try:
            while rank.outbox:
                sent = sock.send(rank.outbox[0])
                rank.outbox[0] = rank.outbox[0][sent:]
                if not rank.outbox[0]:
                    del rank.outbox[0]
        except BlockingIOError:
            pass
        except OSError:
            rank.outbox.clear()  # it has gone; its last words can still be read
        events = _READ_OR_WRITE if rank.outbox else selectors.EVENT_READ
        if not rank.hung_up and self._selector.get_key(sock).events != events:
            self._selector.modify(sock, events, partial(self._on_channel, rank))

    def _read(self, rank: _Rank) -> None:
        try:
            data = rank.child.channel.recv(_READ_BYTES)
        except OSError:  # the other end died with bytes of ours unread
            data = b""
        if not data:
            self._hang_up(rank)
        for answer in map(decode_answer, rank.inbox.feed(data)):
            if isinstance(answer, Failed):
                rank.failed = answer
                self._failures.append(answer)
            else:
                rank.answer = answer

    def _hang_up(self, rank: _Rank) -> None:
        rank.hung_up = True
        self._selector.unregister(rank.child.channel)

    def _on_leash(self, rank: _Rank, _events: int) -> None:
        try:
            data = rank.child.leash.recv(_READ_BYTES)
        except OSError:
            data = b""
        rank.leash_bytes += data
        if not data:
            rank.ended = True
            self._selector.unregister(rank.child.leash)

    def _loss(self) -> RankLost:
        """Who is to blame: a rank that ended without a word rather than one that complains of it."""
        silent = [rank for rank in self._ranks if rank.ended and rank.failed is None]
        if silent:
            sentence = endings_of([(rank.child.rank, rank.exit_code) for rank in silent])
            return RankLost(" ".join([sentence, *(_complaint(f) for f in self._failures[:1])]))
        if self._failures:
            return RankLost(_complaint(self._failures[0]), self._failures[0])
        hung_up = [rank for rank in self._ranks if rank.hung_up]
        return RankLost(f"{_subject(hung_up)} closed the connection.")


def _not_answered(late: Sequence[_Rank], deadline: Deadline) -> RankLost:
    stopped = [rank for rank in late if rank.stopped]
    why = f" {_subject(stopped)} been stopped by a signal." if stopped else ""
    sentence = f"{_subject(late)} not answered within {deadline.means}.{why}"
    return RankLost(sentence, is_late=not stopped)


def _subject(ranks: Sequence[_Rank]) -> str:
    """E.g. "ranks 0, 2 have"."""
    numbers = ", ".join(str(rank.child.rank) for rank in ranks)
    return f"rank {numbers} has" if len(ranks) == 1 else f"ranks {numbers} have"


def endings_of(ranks: Sequence[tuple[int, int | None]]) -> str:
    """A sentence of how some ranks have ended.

    Args:
        ranks: number and exit code of each; None = nobody knows.
    """
    endings = "; ".join(f"rank {rank} {_end_of(exit_code)}" for rank, exit_code in ranks)
    return f"{endings}{_hint_of(*(exit_code for _, exit_code in ranks))}."


def ending_of(exit_code: int) -> str:
    """How a process has ended, to follow its name.

    Args:
        exit_code: of it; of one that a signal has killed, the signal's number below 0.
    """
    return _end_of(exit_code) + _hint_of(exit_code)


def _end_of(exit_code: int | None) -> str:
    if exit_code is None:
        return "went down with its fork-server"
    if exit_code >= 0:
        return f"ended with exit code {exit_code}"
    return f"was killed by signal {-exit_code} ({signal.strsignal(-exit_code)})"


def _hint_of(*exit_codes: int | None) -> str:
    """What may have killed some of several, said once for all."""
    return "; if nobody did that, memory may have run out" if -signal.SIGKILL in exit_codes else ""


def _complaint(failed: Failed) -> str:
    return f"rank {failed.rank} failed: {failed.sentence}"
