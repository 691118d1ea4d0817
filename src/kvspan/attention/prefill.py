"""Attention of rows that stay with their heads: the keys come to them.

    a row's keys = cached context          + the step's own tokens
                   gathered over the group   known on every rank
                   part by part              causal

A rank attends for its own heads over all keys of a sequence, so that nothing is left to exchange.
Cached vectors are gathered a workspace at a time and put in order sequence by sequence; inside one, rank
by rank, which is all the same to attention: keys are cached rotated, and a row sees the whole context.

    workspace of 16 rows, W=2, context of sequences a (5 + 4 tokens on ranks 0 and 1) and b (2 + 2)
        rank 0 gives    a a a a | a b b          rank 1 gives    a a a a | b b
        part 1          a a a a a a a a          part 2          a b b b b

A part of cached context is half a workspace, since there are two at a time: while a rank attends to
one, the next one is on its way.

What is cached may not be keys and values yet. Ranks that need the same ones, those of the same heads,
make them of a part together where that pays (`cost.together`): each of some, and gathers the others.

A plan is made of whole sequences' placements: ranks make the same collectives, of the same sizes.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, zip_longest

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvspan.attention.contract import Kernel, KeyIndex
from kvspan.attention.kv_store import CacheStore
from kvspan.attention.merge import Merged
from kvspan.comm.group import Group, Pending
from kvspan.comm.local import solo
from kvspan.topology import cuts

Counts = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Sees:
    """Which of the gathered rows see which keys of a part: keys lie in one block, in order.

    Args:
        rows: n of the gathered rows.
        index: of those rows.
    """

    rows: slice | Tensor
    index: KeyIndex


@dataclass(frozen=True, slots=True)
class NewPart:
    """Keys of some of the step's own tokens.

    Args:
        span: of the keys of the plan.
        sees: who sees them.
    """

    span: slice
    sees: Sees


@dataclass(frozen=True, slots=True)
class CachedPart:
    """Keys of cached tokens, no more than half a workspace.

    Args:
        blocks: [m] int64, of the tokens that this rank gives.
        offsets: [m] int64, the place in the block of each.
        sizes: tokens that each rank gives.
        order: [sum of sizes] int64, where each key comes from in what was gathered.
        sees: who sees them.
    """

    blocks: Tensor
    offsets: Tensor
    sizes: tuple[int, ...]
    order: Tensor
    sees: Sees


@dataclass(frozen=True, slots=True)
class GatherPlan:
    """Everything that the gathered sequences of a step see; the same for all layers.

    Args:
        rows: which of this rank's rows are theirs: a slice, or [n] int64.
        keys: which of all coordinates' rows, sequence by sequence and in order: [num_keys] int64.
        num_keys: new tokens of the sequences, the same on all ranks.
        new: parts of the step's own keys.
        cached: parts of the context.
    """

    rows: slice | Tensor
    keys: slice | Tensor
    num_keys: int
    new: tuple[NewPart, ...]
    cached: tuple[CachedPart, ...]


@dataclass(frozen=True, slots=True)
class Context:
    """The cached tokens of a gathered sequence.

    Args:
        table: [blocks], this rank's blocks of the sequence in order.
        shares: [W], cached tokens of it on each rank.
    """

    table: NDArray[np.integer]
    shares: Counts


@dataclass(frozen=True, slots=True)
class Asks:
    """Consecutive rows of a sequence that this rank works on.

    Args:
        sequence: which of the gathered ones.
        offset: of the first among the sequence's new tokens.
        num_rows: how many.
    """

    sequence: int
    offset: int
    num_rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Workspace:
    """What a rank's plans are made for.

    Args:
        tokens: of a part of new keys, or of two parts of cached ones, at the most; at least 2 W.
        dcp_rank: of this rank.
        dcp_size: W.
        block_size: B.
        device: where indices lie.
    """

    tokens: int
    dcp_rank: int
    dcp_size: int
    block_size: int
    device: torch.device

    @property
    def _given(self) -> int:
        """Cached tokens that a rank gives to a part at the most."""
        return max(self.tokens // (2 * self.dcp_size), 1)

    def plan(
        self,
        rows: slice | Tensor,
        keys: slice | Tensor,
        *,
        asking: Sequence[Asks],
        sizes: Sequence[int],
        contexts: Sequence[Context],
    ) -> GatherPlan:
        """Cuts the keys of some sequences into parts.

        Args:
            rows: which of this rank's rows are theirs.
            keys: which of all coordinates' rows, sequence by sequence and in order.
            asking: what `rows` are, in order.
            sizes: new tokens of each sequence.
            contexts: of each sequence.
        """
        starts = np.cumsum([0, *sizes])
        new, cached = self._new(starts, asking), self._cached(asking, contexts)
        return GatherPlan(rows, keys, int(starts[-1]), tuple(new), tuple(cached))

    def _new(self, starts: Counts, asking: Sequence[Asks]) -> Iterator[NewPart]:
        """Each row sees its sequence's tokens up to itself."""
        begin, end = (
            np.array([starts[a.sequence] + extra(a) for a in asking], np.int64)
            for extra in (lambda _: 0, lambda a: a.offset + a.num_rows)
        )
        sizes = np.array([a.num_rows for a in asking], np.int64)
        first = np.repeat(begin, sizes)
        last = np.concatenate([np.zeros(0, np.int64), *map(_up_to, end, sizes)])
        for start in range(0, int(starts[-1]), self.tokens):
            stop = min(start + self.tokens, int(starts[-1]))
            which = (begin < stop) & (end > start)
            here = (np.clip(bound - start, 0, stop - start) for bound in (first, last))
            yield NewPart(slice(start, stop), self._sees(sizes, which, *here))

    def _cached(self, asking: Sequence[Asks], contexts: Sequence[Context]) -> Iterator[CachedPart]:
        """Each row sees all of its sequence's context."""
        shares = np.stack([np.zeros(self.dcp_size, np.int64), *(c.shares for c in contexts)])
        bounds = np.cumsum(shares, axis=0)  # [S + 1, W], where each sequence begins in what a rank has
        blocks, offsets = self._slots(contexts)
        sequences = np.array([a.sequence for a in asking], np.int64)
        sizes = np.array([a.num_rows for a in asking], np.int64)
        each = self._given
        for start in range(0, int(bounds[-1].max(initial=0)), each):
            inside = np.clip(bounds - start, 0, each)  # [S + 1, W]
            lengths = np.diff(inside, axis=0).sum(axis=1)  # [S]
            ends = np.cumsum(lengths)
            mine = slice(start, start + each)
            seen = (np.repeat(bound[sequences], sizes) for bound in (ends - lengths, ends))
            yield CachedPart(
                self._tensor(blocks[mine]),
                self._tensor(offsets[mine]),
                tuple(inside[-1].tolist()),
                self._tensor(_order(inside)),
                self._sees(sizes, lengths[sequences] > 0, *seen),
            )

    def _slots(self, contexts: Sequence[Context]) -> tuple[Counts, Counts]:
        """Block and offset of each cached token on this rank, sequence by sequence."""
        slots = [np.divmod(np.arange(c.shares[self.dcp_rank]), self.block_size) for c in contexts]
        blocks = [c.table[columns] for c, (columns, _) in zip(contexts, slots, strict=True)]
        none = np.zeros(0, np.int64)
        return np.concatenate([none, *blocks]), np.concatenate([none, *(offset for _, offset in slots)])

    def _sees(self, sizes: Counts, which: NDArray[np.bool_], first: Counts, last: Counts) -> Sees:
        """Of some of what asks, every row and the keys it sees."""
        rows = np.flatnonzero(np.repeat(which, sizes))
        the_block = torch.zeros(1, dtype=torch.int64, device=self.device)
        index = KeyIndex(
            row_starts=(0, *np.cumsum(sizes[which]).tolist()),
            tables=(the_block,) * int(which.sum()),
            first=first[rows],
            last=last[rows],
        )
        return Sees(row_numbers(rows, self.device), index)

    def _tensor(self, numbers: NDArray[np.integer]) -> Tensor:
        return torch.from_numpy(numbers.astype(np.int64)).to(self.device)


def row_numbers(rows: Counts, device: torch.device) -> slice | Tensor:
    """Ascending numbers of rows, to index with: a slice, which copies nothing, if they are one."""
    start, stop = (int(rows[0]), int(rows[-1]) + 1) if len(rows) else (0, 0)
    return slice(start, stop) if stop - start == len(rows) else torch.from_numpy(rows).to(device)


@dataclass(frozen=True, slots=True)
class Makers:
    """Ranks that need the same keys and values, those of the same heads.

    Args:
        group: all of them; whatever rows each has, their plans have the same parts.
        least_tokens: of a part from which on each makes some of it; of a smaller one each makes all.
    """

    group: Group
    least_tokens: int

    def of(self, num_tokens: int) -> Group:
        """Who makes a part together."""
        return self.group if num_tokens >= self.least_tokens else solo()


EACH_FOR_ITSELF = Makers(solo(), 0)


class OwnHeads:
    """Attention of a rank's own heads over everything that a plan names.

    Args:
        kernel: attention over keys in one block.
        store: this rank's cache.
        group: the ranks that hold the context.
        make: vectors [t, Hkv, cached] -> [t, ...], what of the own heads' keys and values takes work.
        form: vectors and what was made of them -> keys [1, h, t, D] and values [1, h, t, Dv];
            neighbouring queries share one of h.
        makers: who makes the same.
        value_dim: Dv.
        scale: factor on the scores.
    """

    def __init__(
        self,
        kernel: Kernel,
        store: CacheStore,
        group: Group,
        *,
        make: Callable[[Tensor], Tensor],
        form: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
        makers: Makers = EACH_FOR_ITSELF,
        value_dim: int,
        scale: float,
    ) -> None:
        self._kernel, self._store, self._group = kernel, store, group
        self._make, self._form, self._makers = make, form, makers
        self._value_dim, self._scale = value_dim, scale

    def attend(self, query: Tensor, new: Tensor, plan: GatherPlan) -> Tensor:
        """Attention of the plan's rows.

        Args:
            query: [n, heads, D], of the own heads.
            new: [n, Hkv, cached], what is cached of the rows' own tokens, in the query's dtype.
            plan: what they see.

        Returns:
            [n, heads, Dv] in the query's dtype.
        """
        merged = Merged(*query.shape[:2], self._value_dim, device=query.device)
        for sees, vectors in self._parts(new, plan):
            makers = self._makers.of(len(vectors))
            if not query.numel() and makers.size == 1:  # nobody needs what this rank would make
                continue
            made = self._made(vectors, makers)
            if query.numel():  # a rank without rows or heads makes keys for the others
                keys, values = self._form(vectors, made)
                part = self._kernel(query[sees.rows], keys, values, sees.index, self._scale)
                merged.add(sees.rows, *part)
        return merged.out.to(query.dtype)

    def _made(self, vectors: Tensor, makers: Group) -> Tensor:
        """[t, ...]: made of all vectors, of some of them here."""
        shares = cuts(len(vectors), parts=makers.size)
        own = shares[makers.rank]
        made = self._make(vectors[own.start : own.stop])
        return makers.all_gather(made, [share.size for share in shares]).wait()

    def _parts(self, new: Tensor, plan: GatherPlan) -> Iterator[tuple[Sees, Tensor]]:
        """What each part's rows see; the gather of the next part is under way while it is looked at."""
        coming = [self._begun(part) for part in plan.cached[:1]]
        for own in plan.new:
            yield own.sees, new[own.span]
        for part, following in zip_longest(plan.cached, plan.cached[1:]):
            vectors = coming.pop().wait()[part.order]
            coming += [self._begun(following)] if following is not None else []
            yield part.sees, vectors

    def _begun(self, part: CachedPart) -> Pending[Tensor]:
        """The gather of a part, under way."""
        return self._group.all_gather(self._store.read(part.blocks, part.offsets), part.sizes)


def _up_to(end: int, size: int) -> Counts:
    """[size]: what each of consecutive rows sees, the last of them up to `end`."""
    return np.arange(end - size, end) + 1


def _order(inside: Counts) -> Counts:
    """Where keys come from, sequence by sequence, in what was gathered rank by rank.

    Args:
        inside: [S + 1, W], where each sequence begins in what a rank gives.

    Returns:
        [keys] int64.
    """
    first = np.concatenate([[0], np.cumsum(inside[-1])[:-1]])  # where each rank's keys begin
    ranges = [
        np.arange(start, stop)
        for begin, end in pairwise(inside + first)
        for start, stop in zip(begin, end, strict=True)
    ]
    return np.concatenate([np.zeros(0, np.int64), *ranges])
