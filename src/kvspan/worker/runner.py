"""A model's forward passes. Steps that decode are recorded, and played when their shape comes again.

A decode step differs from the one before it in a few tensors alone: its tokens and their angles, where
keys are written and which ones are seen. What layers do is the same native calls, of the same sizes, at
the same addresses. A tape of them is kept for each shape of step, and makes the logits too if rows are
few; a step that is no decode, or a model whose layers are not native throughout, runs in Python as it
always can.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from kvspan.attention.contract import FlatIndex, KeyIndex
from kvspan.attention.putting import Writes
from kvspan.cost.played import MOST_ROWS
from kvspan.layers.logits import Logits
from kvspan.layers.rotary import Rotation
from kvspan.layers.rows import are_all, follow_one_another
from kvspan.models.base import Batch, Model
from kvspan.native import native_path
from kvspan.worker.tape import Scratch, Tape
from kvspan.worker.watch import NO_COLLECTIVE, Collective, Recorder

MOST_SHAPES = 64
"""Tapes that are kept, those played last. More would hardly help: of 7,600 steps of elastic
traffic on 4 coordinates with 600 shapes, 55.0% are played from 64 tapes, and 55.4% from 256."""
STEPS_BEFORE = 2
"""Of a shape, that run in Python before it is recorded. Recording takes as long as two steps, and
playing saves a fifth of one (SmolLM2, one thread: 40, 20 and 16 ms), so a shape that hardly comes back
is not worth it: where requests come and go, and ranks have rows of several kinds, many do not."""
LEAST_ROOM = 1 << 12
"""Blocks of tables that a tape has memory for at the least."""
_MOST_SIGHTINGS = 1024
"""Shapes whose steps are counted, those seen last."""
MOST_SCORED_ROWS = 16
"""Of a step whose logits are on its tape as well. Their memory stays, 10 MB for 16 rows of a vocabulary
of 150,000, and more rows take so long that what Python adds to a step is not seen."""
_SPANS = {
    "attention": "attention",
    "cache": "cache and rotary",
    "linear": "linear",
    "exchange": "exchange",
}
"""What a tape's calls count as -> the span's name; others are the forward pass itself."""


@dataclass(frozen=True, slots=True)
class Ran:
    """What a step's rows gave; another step may write over it.

    Args:
        hidden: [R, hidden_size], the final hidden states, whole on every rank.
        logits: of the rows, where they are all of the step's, with the largest of each; None = nobody
            has made them yet.
        team_logits: likewise of everybody's rows, one coordinate's after another's, idle ones included.
    """

    hidden: Tensor
    logits: Logits | None = None
    team_logits: Logits | None = None


class Runner:
    """Runs a model's layers.

    Args:
        model: whose they are; its cache is allocated anew for none but a new runner.
        recorder: notes the time that calls take.
        scores: whether all rows' logits are made here, and so can be on tape, as those of a team can.
    """

    def __init__(self, model: Model, recorder: Recorder, *, scores: bool = False) -> None:
        self._model, self._recorder, self._scores = model, recorder, scores
        self._scratch = Scratch()
        self._tapes: OrderedDict[_Shape, _Taped | None] = OrderedDict()
        self._sightings: OrderedDict[_Shape, int] = OrderedDict()

    def run(self, batch: Batch) -> Ran:
        """Runs the rows of a step."""
        rotation, shape = self._model.rotation(batch.positions), _Shape.of(batch)
        taped = None
        if shape is not None and shape in self._tapes:
            taped = self._kept(shape)
        elif shape is not None and self._steps_before(shape) >= STEPS_BEFORE:
            return self._record(shape, batch, rotation)
        if taped is None:
            hidden = self._model.forward(batch, rotation)
            return self._scored(hidden, batch.team) if batch.team else Ran(hidden)
        taped.inputs.take(batch, rotation)
        self._play(taped)
        return taped.ran

    def _steps_before(self, shape: "_Shape") -> int:
        """How many of a shape there were, as far as is remembered; one more from now on."""
        number = self._sightings.pop(shape, 0)
        self._sightings[shape] = number + 1
        if len(self._sightings) > _MOST_SIGHTINGS:
            self._sightings.popitem(last=False)
        return number

    def _kept(self, shape: "_Shape") -> "_Taped | None":
        """What is kept of a shape, from now on the last to be let go."""
        self._tapes.move_to_end(shape)
        return self._tapes[shape]

    def _record(self, shape: "_Shape", batch: Batch, rotation: Rotation) -> Ran:
        inputs = _Inputs.like(batch, rotation, shape)
        inputs.take(batch, rotation)
        tape = Tape(inputs.tensors, self._scratch)
        there = inputs.batch(batch)
        with self._recorder.naming(tape.num_calls) as collectives:
            ran = tape.record(
                lambda: self._scored(self._model.forward(there, inputs.rotation), there.team)
            )
        while len(self._tapes) >= MOST_SHAPES:
            self._tapes.popitem(last=False)
        ran = Ran(ran.hidden, self._shared(ran.logits), self._shared(ran.team_logits))
        self._tapes[shape] = None if tape.refusal else _Taped(tape, inputs, ran, collectives)
        return ran

    def _shared(self, logits: Logits | None) -> Logits | None:
        """Those of all tapes are in the same memory, as there is much of it."""
        return logits and replace(logits, mine=self._scratch.shared(logits.mine))

    def _scored(self, hidden: Tensor, team: tuple[int, ...]) -> Ran:
        """With logits behind them, if rows are few: a team makes them with and without a tape."""
        if not (self._scores or team) or (sum(team) or len(hidden)) > MOST_SCORED_ROWS:
            return Ran(hidden)
        logits = self._model.logits(hidden, team).with_largest()
        return Ran(hidden, team_logits=logits) if team else Ran(hidden, logits)

    def _play(self, taped: "_Taped") -> None:
        if not self._recorder.on:
            return taped.tape.play()
        for number, (work, start_s, stop_s) in enumerate(taped.tape.play_timed()):
            if work.name in _SPANS:
                what = taped.collectives.get(number, NO_COLLECTIVE)
                self._recorder.add(_SPANS[work.name], start_s, stop_s, what)
        return None


class _Shape(NamedTuple):
    """What steps have in common that one tape serves.

    Args:
        num_rows: of this rank.
        num_keyed: rows whose keys come here.
        team: `Batch.team`.
        row_sizes: `Batch.row_sizes`.
        asking: of each of `Batch.asking` the rows of each rank of its group.
        rooms: of each of them, blocks of all sequences' tables that there is memory for (`_room`); 0 =
            nobody asks.
    """

    num_rows: int
    num_keyed: int
    team: tuple[int, ...]
    row_sizes: tuple[int, ...]
    asking: tuple[tuple[int, ...], ...]
    rooms: tuple[int, ...]

    @classmethod
    def of(cls, batch: Batch) -> "_Shape | None":
        """The shape of a step; None if it is not one token of each sequence, all alike."""
        asked, num_rows = [asking.keys for asking in batch.asking], len(batch.token_ids)
        is_decode = (
            any(keys.num_rows for keys in asked)
            and len(set(batch.team)) <= 1
            and all(keys.num_rows == len(keys.tables) <= MOST_ROWS for keys in asked)
            and are_all(batch.attending, num_rows)
            and not batch.gathered.num_keys
            and follow_one_another(num_rows, [asking.rows for asking in batch.asking])
        )
        if not is_decode or batch.token_ids.device.type != "cpu" or native_path().isa is None:
            return None
        sizes = tuple(asking.sizes for asking in batch.asking)
        rooms = tuple(_room(len(keys.flat.blocks)) if keys.num_rows else 0 for keys in asked)
        return cls(num_rows, len(batch.writes.blocks), batch.team, batch.row_sizes, sizes, rooms)


def _room(num_blocks: int) -> int:
    """Blocks that there is memory for where so many are needed: the least, or 16 times that, and so on.

    Growing tables so make another shape of a step but seldom. Memory that nobody touches costs nothing.
    """
    room = LEAST_ROOM
    while room < num_blocks:
        room *= 16
    return room


@dataclass(frozen=True, slots=True)
class _Inputs:
    """What a step brings, in memory that stays where it is.

    Args:
        token_ids: of the rows.
        rotation: likewise.
        writes: where keys and values of all rows go that come here.
        flats: which keys the rows of each of `Batch.asking` see; there is room for longer tables.
    """

    token_ids: Tensor
    rotation: Rotation
    writes: Writes
    flats: tuple[FlatIndex, ...]

    @classmethod
    def like(cls, batch: Batch, rotation: Rotation, shape: _Shape) -> "_Inputs":
        """Memory for steps of a shape."""
        writes = batch.writes
        return cls(
            torch.empty_like(batch.token_ids),
            replace(rotation, cos=torch.empty_like(rotation.cos), sin=torch.empty_like(rotation.sin)),
            Writes(torch.empty_like(writes.blocks), torch.empty_like(writes.offsets)),
            tuple(
                FlatIndex(
                    torch.empty_like(flat.row_starts),
                    torch.empty_like(flat.table_starts),
                    torch.empty(room, dtype=torch.int64),
                    torch.empty_like(flat.first),
                    torch.empty_like(flat.last),
                )
                for flat, room in zip(_flats(batch), shape.rooms, strict=True)
            ),
        )

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All of them."""
        return _tensors(self.token_ids, self.rotation, self.writes, self.flats)

    def take(self, batch: Batch, rotation: Rotation) -> None:
        """Fills the memory with what a step brings."""
        brought = _tensors(batch.token_ids, rotation, batch.writes, _flats(batch))
        for mine, its in zip(self.tensors, brought, strict=True):
            mine.numpy()[: len(its)] = its.numpy()  # a fifth of the time that torch takes

    def batch(self, like: Batch) -> Batch:
        """A batch of what is in the memory, for layers."""
        spread, local = (
            replace(asking, keys=KeyIndex.over(flat))
            for asking, flat in zip(like.asking, self.flats, strict=True)
        )
        return replace(like, token_ids=self.token_ids, writes=self.writes, asking=(spread, local))


def _flats(batch: Batch) -> tuple[FlatIndex, ...]:
    return tuple(asking.keys.flat for asking in batch.asking)


def _tensors(
    token_ids: Tensor, rotation: Rotation, writes: Writes, flats: Sequence[FlatIndex]
) -> tuple[Tensor, ...]:
    of_rows = (token_ids, rotation.cos, rotation.sin, writes.blocks, writes.offsets)
    of_keys = ((f.row_starts, f.table_starts, f.blocks, f.first, f.last) for f in flats)
    return *of_rows, *(tensor for each in of_keys for tensor in each)


@dataclass(frozen=True, slots=True)
class _Taped:
    """A recorded step.

    Args:
        tape: of its layers.
        inputs: which they read.
        ran: what it gives.
        collectives: which of them some calls are, if the rank is watched; by number of the call.
    """

    tape: Tape
    inputs: _Inputs
    ran: Ran
    collectives: Mapping[int, Collective]
