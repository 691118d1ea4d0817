"""A model's forward pass on thread ranks, without engine, scheduler or sampler: for layout tests."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from kvspan.attention.backends.registry import choose_kernel
from kvspan.attention.contract import Need
from kvspan.attention.kv_store import CacheFormat
from kvspan.attention.prefill import Workspace
from kvspan.attention.rows import RowGroups
from kvspan.attention.slots import seen_dtype
from kvspan.cache.table import RankTable
from kvspan.comm.group import World
from kvspan.config.model import ModelConfig, parse_model_config
from kvspan.cost.prefill import FEWEST_BYTES, PrefillRule
from kvspan.cost.team import NO_TEAM
from kvspan.layers.linear import Storage
from kvspan.layout import CacheLayout
from kvspan.loading.apply import apply
from kvspan.loading.lazy import Checkpoint
from kvspan.models.base import Model, RankContext
from kvspan.models.registry import build_model
from kvspan.request import SamplingParams
from kvspan.step import NewRequest, Row, Step, pack_tokens
from kvspan.testing.ranks import Call, CountingGroup, CountingWorld, run_ranks, shared_worlds
from kvspan.topology import Span, Topology
from kvspan.worker.batch import Mirrors, build_batch
from kvspan.worker.output import restored
from kvspan.worker.runner import Runner
from kvspan.worker.share import Homes, Shares
from kvspan.worker.watch import Recorder

BLOCKS_PER_POOL = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardCase:
    """How a forward pass is spread and cut.

    Args:
        topology: the grid of ranks.
        block_size: B.
        interleave: I.
        exchange: `a2a` or `ag_rs`.
        replicate_q: whether queries are projected whole on each rank of a DCP group.
        expert_parallel: whether a rank keeps whole experts, or a part of each.
        chunk: tokens of each sequence computed in a step.
        dtype: of weights, activations and cache.
        kv_dtype: of the cache, if it is another.
        workspace_tokens: cached tokens that are gathered or expanded at once.
        random_pools: whether units go to pools at random, and not round them.
        ranks_are_homes: whether a rank of a DCP group attends alone for rows whose keys it has all.
        least_tokens_to_split: new tokens from which on a row is cut over PCP coordinates ...
        meet_tokens: ... and from which on they meet for it, though one of them has all its keys.
        together_tokens: latents from which on coordinates make keys and values of them together.
        team_rows: rows of the fullest coordinate with which they multiply all rows as a team.
        few_rows: that decode, of the fullest coordinate, with which all rows travel if one does.
        prefill_strategy: what travels for cached context.
        shared_memory: whether ranks talk through memory they share, or as threads do.
    """

    topology: Topology = field(default_factory=Topology)
    block_size: int = 8
    interleave: int = 8
    exchange: str = "a2a"
    replicate_q: bool = False
    expert_parallel: bool = False
    chunk: int = 10_000
    dtype: torch.dtype = torch.float32
    kv_dtype: torch.dtype | None = None
    workspace_tokens: int = 16
    least_tokens_to_split: int = 1
    meet_tokens: int = sys.maxsize
    together_tokens: int = sys.maxsize
    team_rows: Span = NO_TEAM
    few_rows: Span = NO_TEAM
    random_pools: bool = False
    ranks_are_homes: bool = False
    prefill_strategy: str = FEWEST_BYTES
    shared_memory: bool = False

    def __str__(self) -> str:
        t = self.topology
        query = "replicate" if self.replicate_q else "gather"
        chunk = f"-chunk{self.chunk}" if self.chunk < 10_000 else ""
        rows = f"P{t.pcp_size}-" if t.pcp_size > 1 else ""
        placement = f"{rows}T{t.tp_size}-W{t.dcp_size}-B{self.block_size}-I{self.interleave}"
        experts = ("-ep" if self.expert_parallel else "") + ("-homes" if self.ranks_are_homes else "")
        return f"{placement}-{self.exchange}-{query}{experts}{chunk}-{self.prefill_strategy}"

    @property
    def num_homes(self) -> int:
        """Homes of a DCP group."""
        return self.topology.dcp_size if self.ranks_are_homes else self.topology.pcp_size

    @property
    def layout(self) -> CacheLayout:
        """How blocks and ranks share a sequence."""
        return CacheLayout(
            block_size=self.block_size, dcp_size=self.topology.dcp_size, interleave=self.interleave
        )


@dataclass(frozen=True, slots=True)
class Forward:
    """What came of it.

    Args:
        logits: for each sequence [tokens, vocabulary] float32, as rank 0 has them.
        calls: for each rank its collectives, group by group, in order; a group of one makes none.
        dcp_calls: those of its DCP group.
        group_calls: for each rank those of each group: TP, DCP, PCP, columns if that is one more, all.
    """

    logits: list[Tensor]
    calls: list[list[Call]]
    dcp_calls: list[list[Call]]
    group_calls: list[list[list[Call]]]


def forward(checkpoint: Checkpoint, sequences: Sequence[Sequence[int]], case: ForwardCase) -> Forward:
    """Logits of every token of some sequences, computed together, chunk by chunk.

    Args:
        checkpoint: config and weights.
        sequences: token ids; sequences of different lengths share each step.
        case: how it is spread and cut.
    """
    size = case.topology.world_size
    with shared_worlds(size if case.shared_memory else 0) as shared:
        results = run_ranks(
            size,
            lambda world: _rank(
                shared[world.rank] if case.shared_memory else world, checkpoint, sequences, case
            ),
        )
    logits, _ = results[0]
    calls = [[c for group in groups if group.size > 1 for c in group.calls] for _, groups in results]
    by_group = [[group.calls if group.size > 1 else [] for group in groups] for _, groups in results]
    return Forward(logits, calls, [groups[1].calls for _, groups in results], by_group)


def _rank(
    world: World, checkpoint: Checkpoint, sequences: Sequence[Sequence[int]], case: ForwardCase
) -> tuple[list[Tensor], list[CountingGroup]]:
    """Logits of each sequence, and the groups: TP, DCP, and those of rows."""
    torch.set_num_threads(1)
    config = parse_model_config(checkpoint.raw_config, where=checkpoint.where)
    counting = CountingWorld(world)
    context = _context(counting, case, config)
    model, rule, workspace = (
        _loaded(checkpoint, config, context),
        _rule(case, config),
        _workspace(context),
    )
    mirrors = Mirrors(
        lambda: RankTable(case.layout, dcp_rank=workspace.dcp_rank, blocks_per_pool=BLOCKS_PER_POOL)
    )
    runner = Runner(model, Recorder(), scores=case.topology.pcp_size == 1)
    parts: dict[int, list[Tensor]] = {i: [] for i in range(len(sequences))}
    with torch.inference_mode():
        for step in _steps(sequences, case):
            mirrors.learn(step)
            shares = _shares(step, mirrors, case, rule, world.rank)
            batch = build_batch(step.rows, shares, mirrors, rule=rule, workspace=workspace)
            ends = np.cumsum([row.num_tokens for row in step.rows])
            everything = np.ones(ends[-1], np.bool_)
            ran = runner.run(batch)
            hidden = restored(ran.hidden, shares, everything, context.row_groups.pcp)
            logits = (ran.logits or model.logits(hidden)).whole().clone()  # the next step writes there
            for row, end in zip(step.rows, ends, strict=True):
                parts[row.request_id].append(logits[end - row.num_tokens : end])
    return [torch.cat(parts[i]) for i in range(len(sequences))], counting.groups


def _context(world: CountingWorld, case: ForwardCase, config: ModelConfig) -> RankContext:
    """Groups are made in the order in which they are reported."""
    tp, dcp = world.group(case.topology.tp_groups()), world.group(case.topology.dcp_groups())
    row_groups = RowGroups.of(world, case.topology, dcp, ranks_are_homes=case.ranks_are_homes)
    cpu, kv_dtype = torch.device("cpu"), case.kv_dtype or case.dtype
    seen = seen_dtype(kv_dtype, case.dtype)
    needs = [
        Need(device="cpu", dtype=seen, head_dim=key, value_dim=value)
        for key, value in config.head_dims.of_kernels
    ]
    return RankContext(
        topology=case.topology,
        rank=world.rank,
        tp=tp,
        dcp=dcp,
        row_groups=row_groups,
        exchange=case.exchange,
        replicate_q=case.replicate_q,
        expert_parallel=case.expert_parallel,
        kernel=choose_kernel(*needs),
        storage=Storage(case.dtype, cpu),
        cache=CacheFormat(block_size=case.block_size, dtype=kv_dtype, computed=case.dtype, device=cpu),
        workspace_tokens=case.workspace_tokens,
        together_tokens=case.together_tokens,
    )


def _loaded(checkpoint: Checkpoint, config: ModelConfig, context: RankContext) -> Model:
    model = build_model(config, context)
    apply(
        checkpoint,
        model.weight_targets(),
        model.parameters_by_name(),
        ignored=model.ignored_weights(),
        prefix=config.tensor_prefix,
    )
    model.settle()
    for store in model.kv_stores():
        store.allocate(BLOCKS_PER_POOL)
    return model


def _rule(case: ForwardCase, config: ModelConfig) -> PrefillRule:
    return PrefillRule.of(
        case.prefill_strategy,
        config,
        case.topology,
        exchange=case.exchange,
        replicate_q=case.replicate_q,
        dtype_bytes=case.dtype.itemsize,
    )


def _workspace(context: RankContext) -> Workspace:
    return Workspace(
        tokens=context.workspace_tokens,
        dcp_rank=context.topology.dcp_rank(context.rank),
        dcp_size=context.topology.dcp_size,
        block_size=context.cache.block_size,
        device=context.storage.device,
    )


def _shares(step: Step, mirrors: Mirrors, case: ForwardCase, rule: PrefillRule, rank: int) -> Shares:
    homes = Homes(
        num_pools=case.layout.num_pools,
        num_homes=case.num_homes,
        pcp_size=case.topology.pcp_size,
        rule=rule,
        split_tokens=case.least_tokens_to_split,
        meet_tokens=case.meet_tokens,
        few_rows=case.few_rows,
    )
    pools = [mirrors[row.request_id].table.used_pools for row in step.rows]
    return Shares.of(
        step.rows,
        homes.of_rows(step.rows, pools),
        case.topology,
        rank,
        num_homes=case.num_homes,
        least_tokens=case.least_tokens_to_split,
        team_rows=case.team_rows,
    )


def _steps(sequences: Sequence[Sequence[int]], case: ForwardCase) -> list[Step]:
    """Chunks of all sequences side by side; units in a scrambled order of blocks, round robin."""
    units = _scrambled_units(case.layout)
    new = tuple(
        NewRequest(i, pack_tokens(tokens), len(tokens), SamplingParams(), 0)
        for i, tokens in enumerate(sequences)
    )
    draws = np.random.default_rng(7)
    placed: Mapping[int, list[int]] = {i: [] for i in range(len(sequences))}
    steps: list[Step] = []
    for start in range(0, max(map(len, sequences)), case.chunk):
        rows = []
        for i, tokens in enumerate(sequences):
            stop = min(start + case.chunk, len(tokens))
            if stop > start:
                needed = case.layout.num_units(stop) - len(placed[i])
                turn = [len(placed[i]) + k for k in range(needed)]
                if case.random_pools:  # runs of one pool, so that many sequences have a home for a while
                    turn = np.repeat(draws.integers(len(units), size=needed), 3)[:needed].tolist()
                fresh = [units[pool % len(units)].pop() for pool in turn]
                placed[i].extend(fresh)
                rows.append(Row(i, start, stop - start, False, (), tuple(fresh)))
        steps.append(Step(len(steps), new if not steps else (), tuple(rows), ()))
    return steps


def _scrambled_units(layout: CacheLayout) -> list[list[int]]:
    """For each pool its units in an order that no formula would give."""
    generator = np.random.default_rng(5)
    return [
        (pool * BLOCKS_PER_POOL + generator.permutation(BLOCKS_PER_POOL)).tolist()
        for pool in range(layout.num_pools)
    ]
