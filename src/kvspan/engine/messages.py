"""What a server's process and an engine's process say to each other.

Both ends write frames as driver and ranks do (`worker.messages`): a length and a message in msgpack.
What a step gave leaves as one message. Knows no sockets and starts no process.
"""

from typing import Any, TypeAlias

import msgspec

from kvspan.config.resolved import Resolved
from kvspan.cost.memory import CachePlan
from kvspan.engine.events import EngineLoad, EngineStats, Event
from kvspan.engine.snapshot import Snapshot
from kvspan.request import SamplingParams
from kvspan.step import RankReport


class Begin(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Order, the first: start the ranks. `Chosen` is told, and then `Ready` or `Died`.

    Args:
        options: of `EngineConfig`, those that were asked.
        max_restarts: how often ranks that were lost are started again, within ten minutes.
        profile: whether a step is taken apart now and then; it costs all steps some percent.
    """

    options: dict[str, Any]
    max_restarts: int
    profile: bool


class Add(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Order: queue a request for one output; it has been checked.

    Args:
        request_id: its own among those of all replicas; the lower, the earlier its turn.
        tokens: prompt, and output that another engine has given (`step.pack_tokens`).
        num_prompt_tokens: how many of them are the prompt.
        params: how tokens are chosen.
        seed: of its random stream.
        cache_salt: prefixes are shared only with requests of the same salt.
        priority: the lower value runs first.
        num_scored_tokens: prompt positions up to which another engine has given log-probabilities.
    """

    request_id: int
    tokens: bytes
    num_prompt_tokens: int
    params: SamplingParams
    seed: int
    cache_salt: str = ""
    priority: int = 0
    num_scored_tokens: int = 0


class Abort(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Order: end requests; those that have ended by themselves are passed over."""

    request_ids: tuple[int, ...]


class Look(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Order: say what the engine looks like. The report is `Seen`; nobody looks, nothing is told."""


class End(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Order: end the ranks and the process."""


Order: TypeAlias = Begin | Add | Abort | Look | End


class Chosen(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Report: what will run, before the ranks are started.

    Args:
        resolved: all choices.
        tokenizer_path: where the model's tokenizer would be, if it has one.
    """

    resolved: Resolved
    tokenizer_path: str


class Ready(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Report: requests can be served.

    Args:
        reports: of the ranks.
        plan: of their caches.
    """

    reports: tuple[RankReport, ...]
    plan: CachePlan


class Stepped(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Report: what a step gave.

    Args:
        events: one for each of its rows.
        stats: counters after it.
        load: what is there after it.
        step_s: seconds that it took.
    """

    events: tuple[Event, ...]
    stats: EngineStats
    load: EngineLoad
    step_s: float


class Begun(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Report: requests are worked on from here on, and if the engine is lost it may be for one of them.

    It leaves before the work begins, so that it is heard even if that is the engine's end. Of those that
    are in no such report the engine knows no more than that they wait.

    Args:
        request_ids: those whose first tokens the next step computes, or whose form is about to be made.
    """

    request_ids: tuple[int, ...]


class Seen(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Report: what the engine looks like.

    Args:
        snapshot: between two steps.
        stats: counters at that moment.
    """

    snapshot: Snapshot
    stats: EngineStats


class CollectiveTime(msgspec.Struct, frozen=True, array_like=True):
    """What a rank spent on one kind of collective in a step.

    Args:
        rank: whose.
        group: the ranks that made it.
        op: which it is.
        seconds: of calls and waits.
        sent_bytes: that the rank sent, round a ring where there is a choice.
    """

    rank: int
    group: str
    op: str
    seconds: float
    sent_bytes: int


class Profiled(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Report: where the time of a step went.

    Args:
        seconds: by part, each without the parts in it; a mean over the ranks.
        step_s: of the whole step.
        collectives: of all ranks that have neighbours.
    """

    seconds: dict[str, float]
    step_s: float
    collectives: tuple[CollectiveTime, ...] = ()


class Idle(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Report: all requests were aborted, so that no step follows.

    Args:
        load: what is there.
    """

    load: EngineLoad


class Recovering(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Report: ranks were lost and are started again; requests wait. `Recovered` or `Died` follows.

    Args:
        why: a sentence.
    """

    why: str


class Recovered(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Report: the requests go on."""


class Died(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Report, the last: the engine ends.

    Args:
        kind: name of a class of `kvspan.errors` that is raised from a sentence alone.
        sentence: why.
    """

    kind: str
    sentence: str


Report: TypeAlias = (
    Chosen | Ready | Begun | Stepped | Profiled | Idle | Seen | Recovering | Recovered | Died
)

_encoder = msgspec.msgpack.Encoder()
_order_decoder: msgspec.msgpack.Decoder[Order] = msgspec.msgpack.Decoder(Order)
_report_decoder: msgspec.msgpack.Decoder[Report] = msgspec.msgpack.Decoder(Report)


def encode(message: Order | Report) -> bytes:
    """The body of a message's frame."""
    return _encoder.encode(message)


def decode_order(body: bytes) -> Order:
    """The order in a frame from the server."""
    return _order_decoder.decode(body)


def decode_report(body: bytes) -> Report:
    """The report in a frame from the engine."""
    return _report_decoder.decode(body)
