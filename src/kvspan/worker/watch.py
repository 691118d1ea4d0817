"""Where a rank's time goes: a recorder of nested spans, and what is put round the parts that take time.

    attention           the kernel, over this rank's keys
    cache and rotary    what else an attention layer does: rotary embedding, cache writes, absorption
    linear              products with weights, activations of MLPs and logits
    exchange            collectives, their waiting included
    prepare             a step's tensors on this rank
    sample              choosing tokens
    forward             the rest of the model: norms, residuals, embedding
    step                the rest of a step

Spans are of the host's time: a device that works on by itself is seen only where it is waited for.
Knows names. Knows no steps and no engine.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from torch import Tensor, nn

from kvspan.attention.contract import Kernel, KeyIndex
from kvspan.attention.scaled import Scaled
from kvspan.clock import Clock, WallClock
from kvspan.comm.group import Group, Pending, Piece, World
from kvspan.layers.linear import ColumnLinear, OutLinear, RowLinear, SplitLinear
from kvspan.layers.mlp import GatedMLP
from kvspan.layers.moe import MoE
from kvspan.models.base import Model
from kvspan.step import TimedSpan
from kvspan.topology import Topology

T = TypeVar("T")

LINEAR: tuple[type[nn.Module], ...] = (ColumnLinear, SplitLinear, RowLinear, OutLinear, GatedMLP, MoE)


@dataclass(frozen=True, slots=True)
class Collective:
    """What a collective is called, and what it moves.

    Args:
        group: its ranks, e.g. "tp"; empty = this is no collective.
        op: which it is.
        sent_bytes: that this rank sends.
    """

    group: str = ""
    op: str = ""
    sent_bytes: int = 0


NO_COLLECTIVE = Collective()


class Recorder:
    """Notes spans of one thread while it is on.

    Args:
        clock: what it reads.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self.on = False
        self._clock = clock or WallClock()
        self._open: list[tuple[str, float, Collective]] = []
        self._inside_s: list[float] = []  # of each open span, what closed spans in it took
        self._spans: list[TimedSpan] = []
        self._num_calls: Callable[[], int] = lambda: 0
        self._collectives: dict[int, Collective] = {}

    def begin(self, name: str, what: Collective = NO_COLLECTIVE) -> None:
        """Opens a span, inside the one that is open."""
        if self.on:
            self._open.append((name, self._clock.now_s(), what))
            self._inside_s.append(0.0)

    def end(self) -> None:
        """Closes the span that was opened last."""
        if self.on:
            (name, start_s, what), stop_s = self._open.pop(), self._clock.now_s()
            own_s = stop_s - start_s - self._inside_s.pop()
            if self._inside_s:
                self._inside_s[-1] += stop_s - start_s
            self._spans.append(
                TimedSpan(name, start_s, stop_s, own_s, what.group, what.op, what.sent_bytes)
            )

    def add(self, name: str, start_s: float, stop_s: float, what: Collective = NO_COLLECTIVE) -> None:
        """A span with none inside it, which somebody else has timed, in the one that is open."""
        if self.on:
            own_s = stop_s - start_s
            if self._inside_s:
                self._inside_s[-1] += own_s
            self._spans.append(
                TimedSpan(name, start_s, stop_s, own_s, what.group, what.op, what.sent_bytes)
            )

    @contextlib.contextmanager
    def span(self, name: str, what: Collective = NO_COLLECTIVE) -> Iterator[None]:
        """A span as a context."""
        first = self._num_calls()
        self.begin(name, what)
        try:
            yield
        finally:
            self.end()
            if what.group:
                self._collectives |= dict.fromkeys(range(first, self._num_calls()), what)

    @contextlib.contextmanager
    def naming(self, num_calls: Callable[[], int]) -> Iterator[dict[int, Collective]]:
        """Notes, on or off, of which collective calls are that somebody else keeps, to time them later.

        Args:
            num_calls: that have been kept so far.

        Yields:
            The number of a call -> its collective.
        """
        self._num_calls, self._collectives = num_calls, {}
        try:
            yield self._collectives
        finally:
            self._num_calls, self._collectives = (lambda: 0), {}

    def switch(self, on: bool) -> list[TimedSpan]:
        """Notes from here on, or no longer; to be called while no span is open.

        Returns:
            What it noted since the last call, in order of their ends.
        """
        assert not self._open, "switched inside a span"
        self.on = on
        spans, self._spans = self._spans, []
        return spans


def watch_layers(model: Model, recorder: Recorder) -> None:
    """Notes the attention and linear layers of a model from here on."""
    for path, module in model.named_modules():
        if isinstance(module, LINEAR):
            _note(module, "linear", recorder)
        elif path.endswith(".attention"):
            _note(module, "cache and rotary", recorder)


def _note(module: nn.Module, name: str, recorder: Recorder) -> None:
    module.register_forward_pre_hook(lambda *_: recorder.begin(name))
    module.register_forward_hook(lambda *_: recorder.end())


class WatchedKernel:
    """A kernel whose calls are noted.

    Args:
        inner: the kernel.
        recorder: what notes them.
    """

    def __init__(self, inner: Kernel, recorder: Recorder) -> None:
        self._inner, self._recorder = inner, recorder
        self.capabilities = inner.capabilities

    def __call__(
        self,
        query: Tensor,
        keys: Tensor | Scaled,
        values: Tensor | Scaled,
        index: KeyIndex,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        """See `contract.Kernel`."""
        with self._recorder.span("attention"):
            return self._inner(query, keys, values, index, scale)


@dataclass(frozen=True, slots=True)
class _WatchedPending(Generic[T]):
    inner: Pending[T]
    recorder: Recorder
    what: Collective

    def wait(self) -> T:
        with self.recorder.span("exchange", self.what):
            return self.inner.wait()


@dataclass(frozen=True, slots=True)
class WatchedWorld:
    """A world of whose groups the collectives are noted.

    Args:
        inner: the world.
        recorder: what notes them.
        topology: knows what its groups are for.
    """

    inner: World
    recorder: Recorder
    topology: Topology

    @property
    def rank(self) -> int:
        """See `World.rank`."""
        return self.inner.rank

    @property
    def size(self) -> int:
        """See `World.size`."""
        return self.inner.size

    def group(self, partition: Sequence[Sequence[int]]) -> "WatchedGroup":
        """See `World.group`."""
        name = group_name(self.topology, partition)
        return WatchedGroup(self.inner.group(partition), self.recorder, name)


def group_name(topology: Topology, partition: Sequence[Sequence[int]]) -> str:
    """What a partition's groups are for; where two purposes have the same ranks, e.g. "tp+dcp"."""
    purposes = {
        "tp": topology.tp_groups(),
        "dcp": topology.dcp_groups(),
        "pcp": topology.pcp_groups(),
        "columns": topology.column_groups(),
        "vocabulary": topology.vocabulary_groups(),
    }
    asked = [tuple(members) for members in partition]
    found = [name for name, groups in purposes.items() if groups == asked]
    return "+".join([name for name in found if name in ("tp", "dcp", "pcp")] or found[:1])


@dataclass(frozen=True, slots=True)
class WatchedGroup:
    """A group whose collectives are noted, from their call to its return and while they are waited for.

    Args:
        inner: the group.
        recorder: what notes them.
        name: of the group.
    """

    inner: Group
    recorder: Recorder
    name: str

    @property
    def rank(self) -> int:
        """See `Group.rank`."""
        return self.inner.rank

    @property
    def size(self) -> int:
        """See `Group.size`."""
        return self.inner.size

    def all_reduce(self, x: Tensor) -> Pending[Tensor]:
        """See `Group.all_reduce`."""
        sent_bytes = 2 * x.nbytes * (self.size - 1) // self.size
        return self._noted("all_reduce", sent_bytes, lambda: self.inner.all_reduce(x))

    def all_gather(self, x: Tensor, sizes: Sequence[int]) -> Pending[Tensor]:
        """See `Group.all_gather`."""
        sent_bytes = x.nbytes * (self.size - 1)
        return self._noted("all_gather", sent_bytes, lambda: self.inner.all_gather(x, sizes))

    def reduce_scatter(self, x: Tensor, sizes: Sequence[int]) -> Pending[Tensor]:
        """See `Group.reduce_scatter`."""
        sent_bytes = x.nbytes - x[: sizes[self.rank]].nbytes
        return self._noted("reduce_scatter", sent_bytes, lambda: self.inner.reduce_scatter(x, sizes))

    def all_to_all(self, parts: Sequence[Tensor], sizes: Sequence[int]) -> Pending[list[Tensor]]:
        """See `Group.all_to_all`."""
        sent_bytes = sum(part.nbytes for part in parts) - parts[self.rank].nbytes
        return self._noted("all_to_all", sent_bytes, lambda: self.inner.all_to_all(parts, sizes))

    def merge_scatter(self, out: Tensor, lse: Tensor, pieces: Sequence[Piece]) -> Pending[Tensor] | None:
        """See `Group.merge_scatter`."""
        with self.recorder.span("exchange", Collective(self.name, "merge_scatter")):
            merged = self.inner.merge_scatter(out, lse, pieces)
        if merged is None:
            return None
        what = Collective(self.name, "merge_scatter", _merged_bytes(out, lse, pieces, self.rank))
        return _WatchedPending(merged, self.recorder, what)

    def _noted(self, op: str, sent_bytes: int, start: Callable[[], Pending[T]]) -> Pending[T]:
        with self.recorder.span("exchange", Collective(self.name, op)):
            pending = start()
        return _WatchedPending(pending, self.recorder, Collective(self.name, op, sent_bytes))


def _merged_bytes(out: Tensor, lse: Tensor, pieces: Sequence[Piece], rank: int) -> int:
    """Bytes of everybody else's piece of [R, H, D] partials, with its LSEs."""
    return sum(
        len(lse[piece.rows])
        * (piece.columns.size * out.itemsize + piece.heads(out.shape[-1]).size * lse.itemsize)
        for other, piece in enumerate(pieces)
        if other != rank
    )
