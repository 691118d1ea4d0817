"""Step -> tensors: what a rank remembers of each request, and the batch that a step makes of it.

Knows tables, slots and rows. Knows no model and no sampler.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from kvspan.attention.contract import FlatIndex, KeyIndex
from kvspan.attention.prefill import Asks, Context, GatherPlan, Workspace, row_numbers
from kvspan.attention.putting import Writes
from kvspan.cache.grown import Grown
from kvspan.cache.table import JoinedTables, RankTable
from kvspan.cost.prefill import PrefillRule
from kvspan.layers.embedding import NO_TOKEN
from kvspan.layout import NO_SLOT
from kvspan.models.base import Asking, Batch
from kvspan.request import SamplingParams
from kvspan.step import NewRequest, Row, Step, unpack_tokens
from kvspan.worker.share import Part, Parts, Shares

N = TypeVar("N", bound=np.generic)

_NOTHING = np.zeros(0, np.int64)
_NO_KEYS = KeyIndex((0,), (), _NOTHING, _NOTHING)
_NOTHING_GATHERED = GatherPlan(slice(0, 0), slice(0, 0), num_keys=0, new=(), cached=())


@dataclass(slots=True)
class RequestMirror:
    """What a rank remembers of a request.

    Args:
        tokens: prompt and output so far.
        num_prompt_tokens: how many of them are the prompt.
        params: what the sampler needs.
        seed: of its random stream.
        table: where its tokens live on this rank.
    """

    tokens: Grown[np.int32]
    num_prompt_tokens: int
    params: SamplingParams
    seed: int
    table: RankTable

    @classmethod
    def of(cls, new: NewRequest, table: RankTable) -> "RequestMirror":
        """The mirror of a request that has just become known."""
        tokens = Grown(unpack_tokens(new.tokens))
        return cls(tokens, new.num_prompt_tokens, new.params, new.seed, table)


class Mirrors:
    """Every request that this rank knows of.

    Args:
        new_table: makes the empty table of a request on this rank.
    """

    def __init__(self, new_table: Callable[[], RankTable]) -> None:
        self._new_table = new_table
        self._by_id: dict[int, RequestMirror] = {}

    def __getitem__(self, request_id: int) -> RequestMirror:
        return self._by_id[request_id]

    def learn(self, step: Step) -> None:
        """Takes in what a step tells of requests, before its rows are worked on."""
        for request_id in step.ended:
            self._by_id.pop(request_id, None)
        for new in step.new:
            self._by_id[new.request_id] = RequestMirror.of(new, self._new_table())
        for row in step.rows:
            mirror = self._by_id[row.request_id]
            mirror.tokens.extend(row.new_tokens)
            mirror.table.append(row.new_units)


def build_batch(
    rows: Sequence[Row], shares: Shares, mirrors: Mirrors, *, rule: PrefillRule, workspace: Workspace
) -> Batch:
    """The tensors of a step's rows on this rank.

    Args:
        rows: of the step.
        shares: how they are dealt out to PCP coordinates.
        mirrors: of their requests.
        rule: which of them have their keys gathered.
        workspace: what keys are gathered in.
    """
    device, keyed, through = workspace.device, shares.keyed_parts, shares.network_parts
    idle = np.zeros(shares.num_idle, np.int64)  # of nobody: no token, no slot, and any position
    known = [mirrors[row.request_id] for row in rows]
    tables = [mirror.table for mirror in known]
    joined = JoinedTables(tables)
    gathered = rule.gathers(
        np.array([row.num_tokens for row in rows], np.int64),
        np.array([row.start for row in rows], np.int64),
    )  # [rows of the step]
    asking, asking_rows = _asking(shares, joined, gathered, device)
    return Batch(
        token_ids=_tensor(
            [
                *(
                    known[row].tokens.values[start : start + num_tokens]
                    for row, start, num_tokens in through.parts
                ),
                idle + NO_TOKEN,
            ],
            device,
        ),
        positions=_tensor([through.position, idle], device),
        attending=_attending(shares, device),
        row_sizes=shares.row_sizes,
        writes=_writes(
            np.concatenate([joined.slots(keyed.row, keyed.position), idle + NO_SLOT]),
            workspace.block_size,
            device,
        ),
        asking=asking,
        asking_rows=row_numbers(asking_rows, device),
        gathered=_plan(rows, tables, gathered, shares, workspace),
        team=shares.team,
    )


def _attending(shares: Shares, device: torch.device) -> slice | torch.Tensor:
    """Of the rows that this rank takes through the network, those that it attends for."""
    if shares.network_parts is shares.own_parts:
        return slice(0, shares.own_parts.num_tokens + shares.num_idle)
    return _in_order(shares.places(shares.own_parts), device)


def _asking(
    shares: Shares, tables: JoinedTables, gathered: NDArray[np.bool_], device: torch.device
) -> tuple[tuple[Asking, Asking], NDArray[np.int64]]:
    """Spread rows of all coordinates and local rows of this one; and which rows they are here."""
    travelling = [[p for p in its if not gathered[p.row]] for its in shares.travelling]
    own, num_travelling = shares.own_parts, shares.row_sizes[shares.own]
    does_travel = np.arange(own.num_tokens) < num_travelling
    asks = does_travel & ~gathered[own.row]  # of those that travel; the others' keys come to them
    if not shares.is_spread:
        local, travelling = travelling[shares.own], [[] for _ in travelling]
        spread, is_local = np.zeros_like(asks), asks
    else:
        local = [*shares.local_parts]
        spread, is_local = asks, ~does_travel
    idle = shares.num_idle
    spread, is_local = _and(spread, idle, False), _and(is_local, idle, True)
    asking = (
        Asking(
            row_numbers(np.flatnonzero(spread), device),
            tuple(sum(p.num_tokens for p in its) for its in travelling),
            _keys(_as_parts([p for its in travelling for p in its], own), tables, device),
        ),
        Asking(
            row_numbers(np.flatnonzero(is_local), device),
            (int(is_local.sum()),),
            _keys(_as_parts(local, own), tables, device, num_idle=idle),
        ),
    )
    return asking, np.flatnonzero(spread | is_local)


def _as_parts(parts: list[Part], own: Parts) -> Parts:
    """Parts of one reach, which mostly are all that a rank attends for: their arrays are made once."""
    return own if parts == own.parts else Parts(parts)


def _keys(parts: Parts, tables: JoinedTables, device: torch.device, *, num_idle: int = 0) -> KeyIndex:
    """What rows see of this rank's keys: those of the positions up to their own; idle ones see none."""
    if not parts.parts and not num_idle:  # as below: in every decode rows have one reach only
        return _NO_KEYS
    joined = tables.chosen([part.row for part in parts.parts])
    sizes = [part.num_tokens for part in parts.parts]
    last = joined.local_bounds(np.repeat(np.arange(len(sizes)), sizes), parts.position + 1)
    last = _and(last, num_idle, 0)
    starts = _and(joined.block_starts, num_idle, len(joined.blocks))
    host = torch.device("cpu")
    flat = FlatIndex(
        row_starts=_tensor([np.cumsum([0, *sizes, *[1] * num_idle])], host),
        table_starts=torch.from_numpy(starts),
        blocks=torch.from_numpy(joined.blocks),
        first=torch.zeros(len(last), dtype=torch.int64),
        last=torch.from_numpy(last),
    )
    return KeyIndex.over(flat, device)


def _plan(
    rows: Sequence[Row],
    tables: Sequence[RankTable],
    gathered: NDArray[np.bool_],
    shares: Shares,
    workspace: Workspace,
) -> GatherPlan:
    """What the rows see whose keys come to them, in the order of their sequences."""
    if not gathered.any():  # as below, in a hundredth of the time, in each step of every decode
        return _NOTHING_GATHERED
    stays = {part.row for its in shares.staying for part in its}
    which = [i for i in np.flatnonzero(gathered).tolist() if i not in stays]
    number = {row: i for i, row in enumerate(which)}
    asking = [
        Asks(number[p.row], p.start - rows[p.row].start, p.num_tokens)
        for p in shares.travelling[shares.own]
        if p.row in number
    ]
    chosen = np.zeros(len(rows), np.bool_)
    chosen[which] = True
    keys = np.flatnonzero(chosen[shares.keyed_parts.row])
    keys = keys[np.argsort(shares.places(shares.keyed_parts)[keys])]  # sequence by sequence
    return workspace.plan(
        row_numbers(np.flatnonzero(chosen[shares.own_parts.row]), workspace.device),
        _in_order(keys, workspace.device),
        asking=asking,
        sizes=[rows[i].num_tokens for i in which],
        contexts=[Context(tables[i].blocks, tables[i].shares(rows[i].start)) for i in which],
    )


def _and(some: NDArray[N], number: int, more: int) -> NDArray[N]:
    """Some values, and then one of them so many times."""
    return np.append(some, np.full(number, more, some.dtype)) if number else some


def _in_order(numbers: NDArray[np.int64], device: torch.device) -> slice | torch.Tensor:
    """Numbers in any order, to index with: a slice if they count up."""
    counts_up = bool((np.diff(numbers) == 1).all())
    return row_numbers(numbers, device) if counts_up else torch.from_numpy(numbers).to(device)


def _writes(slots: NDArray[np.int64], block_size: int, device: torch.device) -> Writes:
    blocks, offsets = np.divmod(slots, block_size)  # of `NO_SLOT` it is `NO_BLOCK`
    return Writes(_tensor([blocks], device), _tensor([offsets], device))


def _tensor(parts: Sequence[NDArray[np.integer]], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.concatenate([_NOTHING, *parts], dtype=np.int64)).to(device)
