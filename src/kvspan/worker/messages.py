"""What the driver and its ranks say to each other, and the frames it travels in.

A frame is the length of its body (8 bytes, little-endian) and the body, one message in msgpack. A rank
answers each order with one answer, in order. Knows no tensors and starts no process.
"""

import socket
import struct
from typing import TypeAlias

import msgspec

from kvspan.step import Fill, RankReport, Step, StepResult, TimedSpan

LENGTH = struct.Struct("<Q")
"""Head of a frame: bytes of its body."""


class Load(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Order: load the weights. The answer is a `Report`."""


class AllocateCache(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Order: allocate the KV cache. The answer is `Allocated`.

    Args:
        num_blocks: blocks of the rank's pool.
    """

    num_blocks: int


class FillCache(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Order: make up keys and values. The answer is `Filled`."""

    fill: Fill


class Watch(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Order: note where time goes from here on, or no longer. The answer is `Watched`."""

    on: bool


class Execute(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Order: run a step. The answer is a `Result` from rank 0 and `Done` from the others."""

    step: Step


class Shutdown(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Order: end. There is no answer; the process ends with exit code 0."""


Order: TypeAlias = Load | AllocateCache | FillCache | Watch | Execute | Shutdown


class Report(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Answer to `Load`."""

    report: RankReport


class Allocated(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Answer to `AllocateCache`."""


class Filled(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Answer to `FillCache`."""


class Watched(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Answer to `Watch`: what was noted since the last one."""

    spans: tuple[TimedSpan, ...]


class Result(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Rank 0's answer to `Execute`."""

    result: StepResult


class Done(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Every other rank's answer to `Execute`."""

    step_id: int


class Failed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Instead of an answer: an exception ended this rank.

    Args:
        rank: whose.
        kind: name of the nearest class of `kvspan.errors` that can be raised again from a sentence
            alone; empty for an exception that kvspan did not raise on purpose.
        sentence: what to tell the user.
        traceback: of the rank, as Python prints it.
    """

    rank: int
    kind: str
    sentence: str
    traceback: str


Answer: TypeAlias = Report | Allocated | Filled | Watched | Result | Done | Failed

_encoder = msgspec.msgpack.Encoder()
_order_decoder = msgspec.msgpack.Decoder(Order)
_answer_decoder: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


def encode(message: Order | Answer) -> bytes:
    """The body of a message's frame."""
    return _encoder.encode(message)


def decode_order(body: bytes) -> Order:
    """The order in a frame from the driver."""
    order: Order = _order_decoder.decode(body)
    return order


def decode_answer(body: bytes) -> Answer:
    """The answer in a frame from a rank."""
    answer: Answer = _answer_decoder.decode(body)
    return answer


class Channel:
    """A rank's end of its connection to the driver; it blocks.

    Args:
        sock: a connected stream socket.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def send(self, body: bytes) -> None:
        """Sends one frame.

        Raises:
            OSError: the driver is gone.
        """
        self._sock.sendall(LENGTH.pack(len(body)) + body)

    def receive(self) -> bytes | None:
        """The body of the next frame, or None when the driver has hung up."""
        head = self._read(LENGTH.size)
        return None if head is None else self._read(LENGTH.unpack(head)[0])

    def _read(self, num_bytes: int) -> bytes | None:
        body = bytearray(num_bytes)
        view = memoryview(body)
        while len(view):
            if not (got := self._sock.recv_into(view)):
                return None
            view = view[got:]
        return bytes(body)
