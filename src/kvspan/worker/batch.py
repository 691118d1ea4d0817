"""Step -> tensors: what a rank remembers of each request, and the batch that a step makes of it.

Knows tables, slots and rows. Knows no model and no sampler.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from kvspan.attention.contract import KeyIndex
from kvspan.attention.slots import Writes
from kvspan.cache.grown import Grown
from kvspan.cache.table import RankTable
from kvspan.layout import NO_SLOT
from kvspan.models.base import Batch
from kvspan.request import SamplingParams
from kvspan.step import NewRequest, Step, unpack_tokens
from kvspan.worker.share import Part, Shares


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


def build_batch(shares: Shares, mirrors: Mirrors, *, block_size: int, device: torch.device) -> Batch:
    """The tensors of a step's rows on this rank."""
    asking = shares.asking_parts
    askers = [mirrors[part.request_id] for part in asking]
    last = _joined([m.table.local_bounds(_span(p) + 1) for m, p in zip(askers, asking, strict=True)])
    return Batch(
        token_ids=_tensor(
            [
                mirrors[p.request_id].tokens.values[p.start : p.start + p.num_tokens]
                for p in shares.own_parts
            ],
            device,
        ),
        positions=_tensor([_span(part) for part in shares.own_parts], device),
        rows=shares.sizes,
        asking=shares.asking_sizes,
        writes=_writes(shares.all_parts, mirrors, block_size=block_size, device=device),
        keys=KeyIndex(
            row_starts=tuple(np.cumsum([0, *(part.num_tokens for part in asking)]).tolist()),
            tables=tuple(_tensor([m.table.blocks], device) for m in askers),
            first=np.zeros_like(last),
            last=last,
        ),
    )


def _span(part: Part) -> NDArray[np.int64]:
    """[n]: positions of a part's tokens."""
    return np.arange(part.start, part.start + part.num_tokens)


def _writes(parts: Sequence[Part], mirrors: Mirrors, *, block_size: int, device: torch.device) -> Writes:
    slots = _joined([mirrors[p.request_id].table.slots(p.start, p.start + p.num_tokens) for p in parts])
    mine = np.flatnonzero(slots != NO_SLOT)
    blocks, offsets = np.divmod(slots[mine], block_size)
    return Writes(_tensor([mine], device), _tensor([blocks], device), _tensor([offsets], device))


def _joined(parts: Sequence[NDArray[np.integer]]) -> NDArray[np.int64]:
    return np.concatenate([np.zeros(0, np.int64), *parts]).astype(np.int64)


def _tensor(parts: Sequence[NDArray[np.integer]], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(_joined(parts)).to(device)
