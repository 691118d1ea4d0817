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
from kvspan.attention.prefill import Context, GatherPlan, Workspace, row_numbers
from kvspan.attention.slots import Writes
from kvspan.cache.grown import Grown
from kvspan.cache.table import JoinedTables, RankTable
from kvspan.cost.prefill import PrefillRule
from kvspan.layout import NO_SLOT
from kvspan.models.base import Batch
from kvspan.request import SamplingParams
from kvspan.step import NewRequest, Row, Step, unpack_tokens

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
    rows: Sequence[Row], mirrors: Mirrors, *, rule: PrefillRule, workspace: Workspace
) -> Batch:
    """The tensors of a step's rows on this rank.

    Args:
        rows: of the step.
        mirrors: of their requests.
        rule: which of them have their keys gathered.
        workspace: what keys are gathered in.
    """
    device = workspace.device
    known = [mirrors[row.request_id] for row in rows]
    tables = JoinedTables([mirror.table for mirror in known])
    sizes = np.array([row.num_tokens for row in rows], np.int64)
    starts = np.array([row.start for row in rows], np.int64)
    request = np.repeat(np.arange(len(rows)), sizes)  # [R]
    positions = np.arange(len(request)) + (starts - np.cumsum(sizes) + sizes)[request]  # [R]
    gathered = rule.gathers(sizes, starts)
    is_gathered = gathered[request]  # [R]
    return Batch(
        token_ids=_tensor(
            [
                m.tokens.values[r.start : r.start + r.num_tokens]
                for m, r in zip(known, rows, strict=True)
            ],
            device,
        ),
        positions=_tensor([positions], device),
        writes=_writes(tables.slots(request, positions), workspace.block_size, device),
        asking=row_numbers(np.flatnonzero(~is_gathered), device),
        keys=_keys(
            JoinedTables([m.table for m in _chosen(known, ~gathered)]),
            sizes[~gathered],
            positions[~is_gathered] + 1,
            device,
        ),
        gathered=_plan(_chosen(known, gathered), _chosen(rows, gathered), is_gathered, workspace),
    )


def _keys(
    tables: JoinedTables, sizes: NDArray[np.int64], bounds: NDArray[np.int64], device: torch.device
) -> KeyIndex:
    """What rows see of this rank's keys: those of the first `bounds` [R] tokens of their sequences."""
    last = tables.local_bounds(np.repeat(np.arange(len(sizes)), sizes), bounds)
    return KeyIndex(
        row_starts=(0, *np.cumsum(sizes).tolist()),
        tables=torch.split(_tensor([tables.blocks], device), tables.sizes),
        first=np.zeros_like(last),
        last=last,
    )


def _plan(
    known: Sequence[RequestMirror],
    rows: Sequence[Row],
    is_gathered: NDArray[np.bool_],
    workspace: Workspace,
) -> GatherPlan:
    contexts = [
        Context(m.table.blocks, m.table.shares(row.start)) for m, row in zip(known, rows, strict=True)
    ]
    numbers = row_numbers(np.flatnonzero(is_gathered), workspace.device)
    return workspace.plan(numbers, [row.num_tokens for row in rows], contexts)


def _chosen(items: Sequence[T], which: NDArray[np.bool_]) -> list[T]:
    return [item for item, is_one in zip(items, which, strict=True) if is_one]


def _writes(slots: NDArray[np.int64], block_size: int, device: torch.device) -> Writes:
    mine = np.flatnonzero(slots != NO_SLOT)
    blocks, offsets = np.divmod(slots[mine], block_size)
    return Writes(_tensor([mine], device), _tensor([blocks], device), _tensor([offsets], device))


def _joined(parts: Sequence[NDArray[np.integer]]) -> NDArray[np.int64]:
    return np.concatenate([np.zeros(0, np.int64), *parts]).astype(np.int64)


def _tensor(parts: Sequence[NDArray[np.integer]], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(_joined(parts)).to(device)
