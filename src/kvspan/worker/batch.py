"""Step -> tensors: what a rank remembers of each request, and the batch that a step makes of it.

Knows tables, slots and rows. Knows no model and no sampler.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from kvspan.attention.contract import KeyIndex
from kvspan.attention.prefill import Asking, Context, GatherPlan, Workspace, row_numbers
from kvspan.attention.slots import Writes
from kvspan.cache.grown import Grown
from kvspan.cache.table import RankTable
from kvspan.cost.prefill import PrefillRule
from kvspan.layout import NO_SLOT
from kvspan.models.base import Batch
from kvspan.request import SamplingParams
from kvspan.step import NewRequest, Row, Step, unpack_tokens
from kvspan.worker.share import Part, Shares

T = TypeVar("T")


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
    device, own = workspace.device, shares.own_parts
    sizes = np.array([row.num_tokens for row in rows], np.int64)
    starts = np.array([row.start for row in rows], np.int64)
    gathered = rule.gathers(sizes, starts)
    asking = [[p for p in shares.by_coordinate[c] if not gathered[p.row]] for c in shares.asking]
    is_gathered = np.repeat([gathered[p.row] for p in own], [p.num_tokens for p in own]).astype(bool)
    return Batch(
        token_ids=_tensor(
            [mirrors[p.request_id].tokens.values[p.start : p.start + p.num_tokens] for p in own], device
        ),
        positions=_tensor([part.span for part in own], device),
        row_sizes=shares.sizes,
        writes=_writes(shares.all_parts, mirrors, block_size=workspace.block_size, device=device),
        asking=row_numbers(np.flatnonzero(~is_gathered), device),
        asker_sizes=tuple(sum(p.num_tokens for p in parts) for parts in asking),
        keys=_keys([p for parts in asking for p in parts], mirrors, device),
        gathered=_plan(rows, gathered, shares, mirrors, is_gathered, workspace),
    )


def _keys(parts: Sequence[Part], mirrors: Mirrors, device: torch.device) -> KeyIndex:
    """What rows see of this rank's keys: the positions up to their own."""
    tables = [mirrors[p.request_id].table for p in parts]
    last = _joined([t.local_bounds(p.span + 1) for t, p in zip(tables, parts, strict=True)])
    return KeyIndex(
        row_starts=tuple(np.cumsum([0, *(p.num_tokens for p in parts)]).tolist()),
        tables=tuple(_tensor([table.blocks], device) for table in tables),
        first=np.zeros_like(last),
        last=last,
    )


def _plan(
    rows: Sequence[Row],
    gathered: NDArray[np.bool_],
    shares: Shares,
    mirrors: Mirrors,
    is_gathered: NDArray[np.bool_],
    workspace: Workspace,
) -> GatherPlan:
    """What the rows see whose keys come to them, in the order of their sequences."""
    its = [row for row, is_one in zip(rows, gathered, strict=True) if is_one]
    tables = [mirrors[row.request_id].table for row in its]
    number = np.cumsum(gathered) - 1  # of a row, among those that are gathered
    asking = [
        Asking(int(number[p.row]), p.start - rows[p.row].start, p.num_tokens)
        for p in shares.own_parts
        if gathered[p.row]
    ]
    places = np.concatenate(shares.places(rows))  # of a key, among the rows of the step
    of_key = np.argsort(places)[np.repeat(gathered, [row.num_tokens for row in rows])]
    return workspace.plan(
        row_numbers(np.flatnonzero(is_gathered), workspace.device),
        _in_order(of_key, workspace.device),
        asking=asking,
        sizes=[row.num_tokens for row in its],
        contexts=[Context(t.blocks, t.shares(row.start)) for t, row in zip(tables, its, strict=True)],
    )


def _in_order(numbers: NDArray[np.int64], device: torch.device) -> slice | torch.Tensor:
    """Numbers in any order, to index with: a slice if they count up."""
    counts_up = bool((np.diff(numbers) == 1).all())
    return row_numbers(numbers, device) if counts_up else torch.from_numpy(numbers).to(device)


def _writes(parts: Sequence[Part], mirrors: Mirrors, *, block_size: int, device: torch.device) -> Writes:
    slots = _joined([mirrors[p.request_id].table.slots(p.start, p.start + p.num_tokens) for p in parts])
    mine = np.flatnonzero(slots != NO_SLOT)
    blocks, offsets = np.divmod(slots[mine], block_size)
    return Writes(_tensor([mine], device), _tensor([blocks], device), _tensor([offsets], device))


def _joined(parts: Sequence[NDArray[np.integer]]) -> NDArray[np.int64]:
    return np.concatenate([np.zeros(0, np.int64), *parts]).astype(np.int64)


def _tensor(parts: Sequence[NDArray[np.integer]], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(_joined(parts)).to(device)
