"""Plans of gathered keys: each key once, sequence by sequence, in no more than a workspace."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvspan.attention.contract import KeyIndex
from kvspan.attention.merge import Merged, merge_shards
from kvspan.attention.prefill import (
    Asks,
    Context,
    GatherPlan,
    Makers,
    OwnHeads,
    Sees,
    Workspace,
    row_numbers,
)
from kvspan.cache.table import RankTable
from kvspan.comm.local import LocalWorld
from kvspan.layout import CacheLayout
from kvspan.testing.ranks import run_ranks

CPU = torch.device("cpu")
BLOCKS = 64


@dataclass(frozen=True)
class Placed:
    """Sequences of (cached, new) tokens on the ranks of a group."""

    layout: CacheLayout
    sequences: list[tuple[int, int]]
    tables: list[list[RankTable]]  # by rank, then by sequence

    @property
    def everything(self) -> list[Asks]:
        """The rows of all sequences, as one rank asks that works on all of them."""
        return [Asks(s, 0, new) for s, (_, new) in enumerate(self.sequences)]

    def plan(self, rank: int, workspace: int, asking: Sequence[Asks] | None = None) -> GatherPlan:
        made = Workspace(
            tokens=workspace,
            dcp_rank=rank,
            dcp_size=self.layout.dcp_size,
            block_size=self.layout.block_size,
            device=CPU,
        )
        contexts = [
            Context(table.blocks, table.shares(cached))
            for table, (cached, _) in zip(self.tables[rank], self.sequences, strict=True)
        ]
        sizes = [new for _, new in self.sequences]
        asking = self.everything if asking is None else asking
        rows, keys = slice(0, sum(a.num_rows for a in asking)), slice(0, sum(sizes))
        return made.plan(rows, keys, asking=asking, sizes=sizes, contexts=contexts)

    def held(self, rank: int) -> dict[int, tuple[int, int]]:
        """Slot -> (sequence, position) of what a rank has cached."""
        return {
            int(slot): (s, position)
            for s, (cached, _) in enumerate(self.sequences)
            for position, slot in enumerate(self.tables[rank][s].slots(0, cached))
            if slot >= 0
        }


def placed(layout: CacheLayout, sequences: list[tuple[int, int]], seed: int) -> Placed:
    """Units on pools at random, as a cache that is nearly full would have it."""
    draws = np.random.default_rng(seed)
    free = [list(draws.permutation(BLOCKS)) for _ in range(layout.num_pools)]
    tables = [
        [RankTable(layout, dcp_rank=r, blocks_per_pool=BLOCKS) for _ in sequences]
        for r in range(layout.dcp_size)
    ]
    for s, (cached, new) in enumerate(sequences):
        pools = draws.integers(layout.num_pools, size=layout.num_units(cached + new))
        units = [int(pool) * BLOCKS + int(free[pool].pop()) for pool in pools]
        for of_rank in tables:
            of_rank[s].append(units)
    return Placed(layout, sequences, tables)


@st.composite
def placements(draw: st.DrawFn) -> tuple[Placed, int]:
    dcp_size = draw(st.integers(1, 4))
    interleave = draw(st.sampled_from([1, 2, 8]))
    layout = CacheLayout(block_size=8, dcp_size=dcp_size, interleave=interleave)
    tokens = st.tuples(st.integers(0, 70), st.integers(1, 9))
    sequences = draw(st.lists(tokens, min_size=1, max_size=4))
    workspace = 2 * dcp_size * draw(st.integers(1, 15))
    return placed(layout, sequences, draw(st.integers(0, 2**16))), workspace


def seen_by_rows(plan: list[GatherPlan], where: Placed) -> list[list[tuple[int, int]]]:
    """For each gathered row, the (sequence, position) of each key it sees, as all ranks do the plan."""
    num_rows = plan[0].rows.stop
    seen: list[list[tuple[int, int]]] = [[] for _ in range(num_rows)]

    def look(sees: Sees, keys: list[tuple[int, int]]) -> None:
        rows = np.arange(num_rows)[sees.rows]
        for row, first, last in zip(rows, sees.index.first, sees.index.last, strict=True):
            seen[row].extend(keys[first:last])

    own = [(s, cached + i) for s, (cached, new) in enumerate(where.sequences) for i in range(new)]
    for part in plan[0].new:
        look(part.sees, own[part.span])
    held = [where.held(rank) for rank in range(len(plan))]
    for parts in zip(*(p.cached for p in plan), strict=True):
        given = []
        for rank, part in enumerate(parts):
            slots = (part.blocks * where.layout.block_size + part.offsets).tolist()
            assert len(slots) == part.sizes[rank]
            given += [held[rank][slot] for slot in slots]
        look(parts[0].sees, [given[i] for i in parts[0].order])
        for part in parts:
            assert part.sizes == parts[0].sizes
            assert torch.equal(part.order, parts[0].order)
    return seen


@given(placements())
def test_each_row_sees_each_key_of_its_sequence_up_to_itself_once(made: tuple[Placed, int]) -> None:
    where, workspace = made
    plans = [where.plan(rank, workspace) for rank in range(where.layout.dcp_size)]
    seen, row = seen_by_rows(plans, where), 0
    for s, (cached, new) in enumerate(where.sequences):
        for i in range(new):
            assert sorted(seen[row]) == [(s, position) for position in range(cached + i + 1)]
            row += 1


@given(placements(), st.data())
def test_some_of_the_rows_see_the_same(made: tuple[Placed, int], data: st.DataObject) -> None:
    """As a rank asks that works on some chunks of some sequences; all ranks gather the same."""
    where, workspace = made
    asking = []
    for s, (_, new) in enumerate(where.sequences):
        cuts = sorted(data.draw(st.sets(st.integers(0, new), max_size=3)))
        chunks = [Asks(s, a, b - a) for a, b in itertools.pairwise(cuts)]
        asking += chunks[:: data.draw(st.integers(1, 2))]
    plans = [
        where.plan(rank, workspace, asking if rank == 0 else []) for rank in range(where.layout.dcp_size)
    ]
    seen, row = seen_by_rows(plans, where), 0
    for a in asking:
        for i in range(a.offset, a.offset + a.num_rows):
            last = where.sequences[a.sequence][0] + i
            assert sorted(seen[row]) == [(a.sequence, position) for position in range(last + 1)]
            row += 1


@given(placements())
def test_two_parts_are_no_more_than_a_workspace(made: tuple[Placed, int]) -> None:
    where, workspace = made
    plan = where.plan(0, workspace)
    half = workspace // 2
    assert all(sum(part.sizes) <= half for part in plan.cached)
    assert all(max(part.sizes) <= half // where.layout.dcp_size for part in plan.cached)
    assert all(part.span.stop - part.span.start <= workspace for part in plan.new)
    # As few as the rank with most cached tokens allows.
    most = max(
        sum(where.tables[r][s].shares(cached)[r] for s, (cached, _) in enumerate(where.sequences))
        for r in range(where.layout.dcp_size)
    )
    assert len(plan.cached) == -(-most // (half // where.layout.dcp_size))


def test_sequences_share_a_part_in_order() -> None:
    """The picture of the module: a has 5 + 4 cached tokens, b has 2 + 2, and a part has room for 8.

    A workspace has room for two parts.
    """
    layout = CacheLayout(block_size=8, dcp_size=2, interleave=1)
    made = placed(layout, [(9, 1), (4, 2)], seed=0)
    first, second = made.plan(0, 16).cached
    assert (first.sizes, second.sizes) == ((4, 4), (3, 2))
    assert first.order.tolist() == list(range(8))
    assert second.order.tolist() == [0, 1, 2, 3, 4]
    assert second.sees.index.first.tolist() == [0, 1, 1]
    assert second.sees.index.last.tolist() == [1, 5, 5]


@pytest.mark.parametrize("rows", [[], [0], [3, 4, 5], [1, 3], [0, 2, 3]])
def test_rows_side_by_side_are_a_slice(rows: list[int]) -> None:
    numbers = row_numbers(np.array(rows, np.int64), CPU)
    assert torch.arange(10)[numbers].tolist() == rows
    assert isinstance(numbers, slice) == (rows in ([], [0], [3, 4, 5]))


def test_parts_merge_as_shards_do() -> None:
    generator = torch.Generator().manual_seed(1)
    out = torch.randn(3, 5, 2, 4, generator=generator)
    lse = 9 * torch.randn(3, 5, 2, generator=generator)
    lse[0, 1] = lse[1, 2] = lse[:, 3] = -torch.inf
    out[lse == -torch.inf] = 0.0
    merged = Merged(5, 2, 4, device=CPU)
    for part, of_part in zip(out, lse, strict=True):
        for rows in (slice(0, 2), torch.tensor([4, 2]), torch.tensor([3])):
            merged.add(rows, part[rows], of_part[rows])
    wanted = merge_shards(out, lse)
    torch.testing.assert_close((merged.out, merged.lse), wanted)


class Noting:
    """A store, a group of one of two ranks and a kernel that note what they are asked for, in order."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.tokens_at_once = self._tokens = 0
        self._begun = 0

    rank, size, bytes_per_token = 0, 2, 2

    def read(self, blocks: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(blocks), 1, 2)

    def all_gather(self, x: torch.Tensor, sizes: Sequence[int]) -> "NotedGather":
        self._begun += 1
        self.events.append(f"gather {self._begun}")
        self._tokens += sum(sizes)
        self.tokens_at_once = max(self.tokens_at_once, self._tokens)
        return NotedGather(self, self._begun, sum(sizes))

    def kernel(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        index: KeyIndex,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.events.append("attend")
        return torch.zeros(*query.shape[:2], 1), torch.zeros(query.shape[:2])

    def left(self, num_tokens: int) -> None:
        self._tokens -= num_tokens


@dataclass
class NotedGather:
    by: Noting
    number: int
    num_tokens: int

    def wait(self) -> torch.Tensor:
        self.by.events.append(f"here {self.number}")
        self.by.left(self.num_tokens if self.number > 1 else 0)  # one part stays while it is attended to
        return torch.zeros(self.num_tokens, 1, 2)


def test_the_next_part_is_on_its_way_while_one_is_attended_to() -> None:
    layout = CacheLayout(block_size=8, dcp_size=2, interleave=1)
    made = placed(layout, [(22, 2)], seed=0)
    noting = Noting()
    own = OwnHeads(
        noting.kernel,
        noting,  # type: ignore[arg-type]
        noting,  # type: ignore[arg-type]
        make=lambda vectors: vectors,
        form=lambda vectors, made: (vectors[None], made[None]),
        value_dim=1,
        scale=1.0,
    )
    own.attend(torch.zeros(2, 1, 1), torch.zeros(2, 1, 2), made.plan(0, 16))
    assert noting.events == [
        "gather 1",
        *("attend", "here 1", "gather 2"),  # the step's own tokens
        *("attend", "here 2", "gather 3"),
        *("attend", "here 3", "attend"),
    ]
    assert noting.tokens_at_once <= 16


@pytest.mark.parametrize("workspace", [12, 100])
def test_makers_share_a_part_out_and_no_rank_has_more_than_a_workspace(workspace: int) -> None:
    """3 ranks that need the same keys: each part is made once, also by a rank without rows."""
    layout = CacheLayout(block_size=8, dcp_size=3, interleave=1)
    where = placed(layout, [(22, 20)], seed=0)

    def work(world: LocalWorld) -> tuple[list[int], list[int]]:
        store, group = Noting(), world.group([(0, 1, 2)])
        made: list[int] = []
        formed: list[int] = []

        def make(vectors: torch.Tensor) -> torch.Tensor:
            made.append(len(vectors))
            return vectors.clone()

        def form(vectors: torch.Tensor, made: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            assert torch.equal(vectors, made)
            formed.append(len(made))
            return made.transpose(0, 1)[None], made.transpose(0, 1)[None]

        own = OwnHeads(
            store.kernel,
            store,  # type: ignore[arg-type]
            group,
            make=make,
            form=form,
            makers=Makers(group, least_tokens=5),
            value_dim=1,
            scale=1.0,
        )
        asking = where.everything if world.rank else []
        rows = sum(a.num_rows for a in asking)
        new = torch.arange(40.0).view(20, 1, 2)
        own.attend(torch.zeros(rows, 1, 1), new, where.plan(world.rank, workspace, asking))
        return made, formed

    (idle_made, idle_formed), *busy = run_ranks(3, work)
    parts = busy[0][1]
    assert idle_formed == []
    assert sum(parts) == 42
    assert max(parts) <= workspace
    every = [idle_made, *(made for made, _ in busy)]
    shared = [n for n in parts if n >= 5]
    assert sum(map(sum, every)) == sum(shared) + 2 * sum(n for n in parts if n < 5)
    assert max(idle_made) <= max(shared) // 3 + 8  # a share, balanced to one piece
