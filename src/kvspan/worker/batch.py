"""Step -> tensors: what a rank remembers of each request, and the batch that a step makes of it.

Knows tables, slots and rows. Knows no model and no sampler.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from kvspan.attention.contract import KeyIndex
from kvspan.attention.prefill import Asking, Context, GatherPlan, Workspace, row_numbers
from kvspan.attention.putting import Writes
from kvspan.cache.grown import Grown
from kvspan.cache.table import JoinedTables, RankTable
from kvspan.cost.prefill import PrefillRule
from kvspan.layout import NO_SLOT
from kvspan.models.base import Batch
from kvspan.request import SamplingParams
from kvspan.step import NewRequest, Row, Step, unpack_tokens
from kvspan.worker.share import Shares


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
    device, own = workspace.device, shares.own_rows
    known = [mirrors[row.request_id] for row in rows]
    tables = [mirror.table for mirror in known]
    gathered = rule.gathers(
        np.array([row.num_tokens for row in rows], np.int64), shares.row_positions
    )  # [rows of the step]
    is_gathered = gathered[shares.row_of]  # [all rows]
    slots = JoinedTables(tables).slots(shares.row_of, shares.positions)
    asks = [~is_gathered[shares.rows_of(c, c + 1)] for c in shares.asking]
    parts = shares.parts[shares.asking_parts]
    return Batch(
        token_ids=_tensor(
            [
                known[row].tokens.values[start : start + num_tokens]
                for row, start, num_tokens in shares.by_coordinate[shares.own]
            ],
            device,
        ),
        positions=_tensor([shares.positions[own]], device),
        row_sizes=shares.sizes,
        writes=_writes(slots, workspace.block_size, device),
        asking=row_numbers(np.flatnonzero(~is_gathered[own]), device),
        asker_sizes=tuple(int(each.sum()) for each in asks),
        keys=_keys(
            parts[~gathered[parts[:, 0]]],
            tables,
            shares.positions[shares.asking_rows][np.concatenate(asks)] + 1,
            device,
        ),
        gathered=_plan(rows, tables, gathered, shares, workspace),
    )


def _keys(
    parts: NDArray[np.int64],
    tables: Sequence[RankTable],
    bounds: NDArray[np.int64],
    device: torch.device,
) -> KeyIndex:
    """What rows see of this rank's keys: those of the first `bounds` [R] tokens of their sequences."""
    joined, sizes = JoinedTables([tables[row] for row in parts[:, 0]]), parts[:, 2]
    last = joined.local_bounds(np.repeat(np.arange(len(sizes)), sizes), bounds)
    return KeyIndex(
        row_starts=(0, *np.cumsum(sizes).tolist()),
        tables=torch.split(_tensor([joined.blocks], device), joined.sizes),
        first=np.zeros_like(last),
        last=last,
    )


def _plan(
    rows: Sequence[Row],
    tables: Sequence[RankTable],
    gathered: NDArray[np.bool_],
    shares: Shares,
    workspace: Workspace,
) -> GatherPlan:
    """What the rows see whose keys come to them, in the order of their sequences."""
    which = np.flatnonzero(gathered).tolist()
    number = np.cumsum(gathered) - 1  # of a row, among those that are gathered
    asking = [
        Asking(int(number[p.row]), p.start - rows[p.row].start, p.num_tokens)
        for p in shares.by_coordinate[shares.own]
        if gathered[p.row]
    ]
    is_gathered = gathered[shares.row_of]
    keys = np.flatnonzero(is_gathered)
    keys = keys[np.argsort(shares.places[keys])]  # sequence by sequence
    return workspace.plan(
        row_numbers(np.flatnonzero(is_gathered[shares.own_rows]), workspace.device),
        _in_order(keys, workspace.device),
        asking=asking,
        sizes=[rows[i].num_tokens for i in which],
        contexts=[Context(tables[i].blocks, tables[i].shares(rows[i].start)) for i in which],
    )


def _in_order(numbers: NDArray[np.int64], device: torch.device) -> slice | torch.Tensor:
    """Numbers in any order, to index with: a slice if they count up."""
    counts_up = bool((np.diff(numbers) == 1).all())
    return row_numbers(numbers, device) if counts_up else torch.from_numpy(numbers).to(device)


def _writes(slots: NDArray[np.int64], block_size: int, device: torch.device) -> Writes:
    mine = np.flatnonzero(slots != NO_SLOT)
    blocks, offsets = np.divmod(slots[mine], block_size)
    return Writes(_tensor([mine], device), _tensor([blocks], device), _tensor([offsets], device))


def _joined(parts: Sequence[NDArray[np.integer]]) -> NDArray[np.int64]:
    return np.concatenate([np.zeros(0, np.int64), *parts]).astype(np.int64)


def _tensor(parts: Sequence[NDArray[np.integer]], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(_joined(parts)).to(device)
