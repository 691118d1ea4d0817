"""Which request of a trace is sent when. Pure: time comes in as numbers, answers come in as they end.

An **open loop** sends by the trace's own clock, whatever becomes of earlier requests: it shows what
users of a given rate would feel. A **closed loop** is a number of users, each of whom asks again as soon
as they are answered: it shows what a system can do. Users go through whole sessions, turn by turn, since
an agent's next turn cannot come before the answer to the last one.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvspan.errors import ConfigError
from kvspan.trace.row import Trace, TraceRow


@dataclass(frozen=True, slots=True)
class Due:
    """A request that is to be sent.

    Args:
        index: of its row in the trace.
        due_s: when it should be sent, in seconds from the start of the run.
    """

    index: int
    due_s: float


class Schedule(Protocol):
    """Hands out requests; every one that it has handed out is given back to `ended` once."""

    @property
    def drained(self) -> bool:
        """Whether fewer requests are left than the schedule would have under way."""
        ...

    def take(self, now_s: float) -> list[Due]:
        """The requests that are due by now, each once."""
        ...

    def next_s(self) -> float | None:
        """When the next one is due; None = that depends on answers, or there is none."""
        ...

    def ended(self, index: int, now_s: float) -> None:
        """A request has its answer, or an error."""
        ...


class OpenLoop:
    """Requests at the trace's own times.

    Args:
        trace: the rows.
        speed_up: what intervals are divided by.

    Raises:
        ConfigError: the speed-up is not positive.
    """

    def __init__(self, trace: Trace, *, speed_up: float = 1.0) -> None:
        if not 0 < speed_up < float("inf"):
            raise ConfigError(f"--speed-up {speed_up:g} must be more than 0.")
        begin_ms = trace.rows[0].timestamp_ms
        self._left = deque(
            Due(index, (row.timestamp_ms - begin_ms) / 1000 / speed_up)
            for index, row in enumerate(trace.rows)
        )

    @property
    def drained(self) -> bool:
        """Whether all requests have been handed out."""
        return not self._left

    def take(self, now_s: float) -> list[Due]:
        """The requests that are due by now, each once."""
        due = []
        while self._left and self._left[0].due_s <= now_s:
            due.append(self._left.popleft())
        return due

    def next_s(self) -> float | None:
        """When the next one is due."""
        return self._left[0].due_s if self._left else None

    def ended(self, index: int, now_s: float) -> None:
        """Nothing depends on it."""


class ClosedLoop:
    """A number of users. Each takes the trace's next session and asks its turns one after another.

    Args:
        trace: the rows.
        users: requests under way at a time.

    Raises:
        ConfigError: there are no users.
    """

    def __init__(self, trace: Trace, *, users: int) -> None:
        if users < 1:
            raise ConfigError(f"--concurrency {users} is too small: 1 or more.")
        self._waiting = deque(deque(turns) for turns in sessions(trace))
        self._busy: dict[int, deque[int]] = {}  # the turn under way -> those that follow
        self._due: list[Due] = []
        self._num_idle = 0
        for _ in range(users):
            self._ask(deque(), 0.0)

    @property
    def drained(self) -> bool:
        """Whether a user has found no session left."""
        return self._num_idle > 0

    def take(self, now_s: float) -> list[Due]:
        """The requests that are due by now, each once."""
        due = [each for each in self._due if each.due_s <= now_s]
        self._due = [each for each in self._due if each.due_s > now_s]
        return due

    def next_s(self) -> float | None:
        """Answers decide, not time."""
        return self._due[0].due_s if self._due else None

    def ended(self, index: int, now_s: float) -> None:
        """Its user asks the next turn, or takes another session."""
        self._ask(self._busy.pop(index), now_s)

    def _ask(self, turns: deque[int], now_s: float) -> None:
        if not turns and self._waiting:
            turns = self._waiting.popleft()
        if turns:
            index = turns.popleft()
            self._busy[index] = turns
            self._due.append(Due(index, now_s))
        else:
            self._num_idle += 1


def sessions(trace: Trace) -> list[list[int]]:
    """Rows that extend one another's prompts, as indices, in order of time; a row is in one session.

    A row follows an earlier one if its ids begin with all ids of whole blocks that the earlier one has;
    the longest such beginning counts. Rows with no whole block, or no ids, are sessions of their own.

    Args:
        trace: the rows.

    Returns:
        The sessions in order of their first rows.
    """
    found: list[list[int]] = []
    last_turn: dict[int, list[int]] = {}  # id of the last whole block of a session so far -> the session
    for index, row in enumerate(trace.rows):
        whole = _whole_blocks(row, trace.block_tokens)
        session = next((last_turn.pop(i) for i in reversed(whole) if i in last_turn), None)
        if session is None:
            found.append(session := [])
        session.append(index)
        if whole:
            last_turn[whole[-1]] = session
    return found


def _whole_blocks(row: TraceRow, block_tokens: int) -> Sequence[int]:
    return row.hash_ids[: row.input_length // block_tokens]
