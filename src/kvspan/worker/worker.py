"""One rank: its part of the model, its part of the cache, and what a step does to them.

A worker obeys and decides nothing: what it computes, and which collectives it makes, follows from the
step alone, so its neighbours do the same by construction.
"""

from collections.abc import Callable
from dataclasses import replace

import psutil
import torch

from kvspan.attention.backends.registry import choose_kernel
from kvspan.attention.contract import Need
from kvspan.attention.kv_store import CacheFormat
from kvspan.attention.prefill import Workspace
from kvspan.attention.rows import RowGroups
from kvspan.attention.slots import seen_dtype
from kvspan.cache.table import RankTable
from kvspan.comm.group import World
from kvspan.config.resolved import Resolved
from kvspan.cost.prefill import PrefillRule
from kvspan.layers.linear import Storage
from kvspan.loading.apply import apply
from kvspan.loading.resolve import resolve
from kvspan.loading.trim import give_back
from kvspan.models.base import Batch, Model, RankContext
from kvspan.models.registry import build_model
from kvspan.sampling.sampler import Sampler
from kvspan.step import Fill, RankReport, Step, StepResult, TimedSpan
from kvspan.worker.batch import Mirrors, build_batch
from kvspan.worker.fill import Filler
from kvspan.worker.output import Outputs
from kvspan.worker.runner import Runner
from kvspan.worker.share import Homes, Shares
from kvspan.worker.watch import Recorder, WatchedKernel, WatchedWorld, watch_layers


class Worker:
    """Fulfils a rank's side of `step.Executor`.

    Args:
        resolved: what will run.
        world: all ranks; the worker makes its groups from it.
        watched: whether it can say where its time goes; watching costs a little even while it is off.
    """

    def __init__(self, resolved: Resolved, world: World, *, watched: bool = False) -> None:
        self._resolved, self._rank = resolved, world.rank
        self._device = rank_device(resolved.device, world.rank)
        self._recorder = Recorder()
        if watched:
            world = WatchedWorld(world, self._recorder, resolved.topology)
        context = _context(resolved, world, self._device)
        if watched:
            context = replace(context, kernel=WatchedKernel(context.kernel, self._recorder))
        self._model = build_model(resolved.model_config, context)
        if watched:
            watch_layers(self._model, self._recorder)
        self._outputs = Outputs(
            self._model,
            Sampler(),
            eos_token_ids=resolved.model_config.eos_token_ids,
            is_speaker=world.rank == 0,
            pcp=context.row_groups.pcp,
            recorder=self._recorder,
        )
        self._runner = self._new_runner()
        self._new_table: Callable[[], RankTable] = self._no_table
        self._mirrors = Mirrors(self._new_table)
        self._rule = _prefill_rule(resolved)
        self._homes = Homes.of(resolved, self._rule)
        self._workspace = _workspace(resolved, world.rank, self._device)
        self._next_step_id = 0

    @property
    def model(self) -> Model:
        """This rank's part of the model."""
        return self._model

    def load(self) -> RankReport:
        """Loads this rank's part of the weights."""
        model, resolved = self._model, self._resolved
        checkpoint = resolve(resolved.model, resolved.load_format, seed=resolved.seed)
        parameters = model.parameters_by_name()
        apply(
            checkpoint,
            model.weight_targets(),
            parameters,
            ignored=model.ignored_weights(),
            prefix=resolved.model_config.tensor_prefix,
        )
        weight_bytes = sum(p.numel() * p.itemsize for p in parameters.values())
        parameters.clear()  # so that each weight can go when it has been settled
        model.settle()
        del checkpoint
        give_back()
        return RankReport(
            rank=self._rank,
            weight_bytes=weight_bytes,
            free_bytes=_free_bytes(self._device),
            kv_bytes_per_token=sum(store.bytes_per_token for store in model.kv_stores()),
        )

    def allocate_cache(self, num_blocks: int) -> None:
        """Makes room for `num_blocks` blocks in each layer; requests known so far are forgotten."""
        for store in self._model.kv_stores():
            store.allocate(num_blocks)
        self._runner = self._new_runner()  # what is on tape was for the cache before
        layout = self._resolved.cache_layout
        dcp_rank = self._resolved.topology.dcp_rank(self._rank)
        self._new_table = lambda: RankTable(layout, dcp_rank=dcp_rank, blocks_per_pool=num_blocks)
        self._mirrors = Mirrors(self._new_table)

    @torch.inference_mode()
    def fill(self, fill: Fill) -> None:
        """Makes up keys and values for units of which nothing is computed."""
        resolved = self._resolved
        filler = Filler(
            self._model.kv_stores(),
            resolved.model_config,
            kv_heads=resolved.topology.kv_heads(self._rank, resolved.model_config.heads),
            block_size=resolved.block_size,
            dtype=torch_dtype(resolved.dtype),
            device=self._device,
        )
        table = self._new_table()
        table.append(fill.units)
        filler.fill(table, num_tokens=fill.num_tokens, seed=fill.seed)

    def watch(self, on: bool) -> list[TimedSpan]:
        """Notes where time goes from here on, or no longer; what it noted since the last call."""
        return self._recorder.switch(on)

    def prepare(self, step: Step) -> tuple[Shares, Batch]:
        """Takes in what a step tells of requests; deals its rows out, and makes their tensors."""
        self._mirrors.learn(step)
        pools = [self._mirrors[row.request_id].table.used_pools for row in step.rows]
        shares = Shares.of(
            step.rows,
            self._homes.of_rows(step.rows, pools),
            self._resolved.topology,
            self._rank,
            num_homes=self._resolved.num_homes,
            least_tokens=self._resolved.split_tokens,
            team_rows=self._resolved.team_rows,
        )
        batch = build_batch(step.rows, shares, self._mirrors, rule=self._rule, workspace=self._workspace)
        return shares, batch

    @torch.inference_mode()
    def execute(self, step: Step) -> StepResult:
        """Does a step; the result is whole on rank 0 alone."""
        assert step.step_id == self._next_step_id, f"step {step.step_id} came for {self._next_step_id}"
        self._next_step_id += 1
        with self._recorder.span("step"):
            return self._execute(step)

    def close(self) -> None:
        """Gives the memory back."""
        for store in self._model.kv_stores():
            store.allocate(0)

    def _execute(self, step: Step) -> StepResult:
        with self._recorder.span("prepare"):
            shares, batch = self.prepare(step)
        if not step.rows:  # it only told who has ended
            return StepResult(step.step_id, ())
        with self._recorder.span("forward"):
            ran = self._runner.run(batch)
        with self._recorder.span("sample"):
            sampled = self._outputs.of(step.rows, self._mirrors, ran, shares)
        return StepResult(step.step_id, sampled)

    def _new_runner(self) -> Runner:
        """Logits of rows that another coordinate works on are made there, or those of all together."""
        return Runner(self._model, self._recorder, scores=self._resolved.pcp_size == 1)

    @staticmethod
    def _no_table() -> RankTable:
        raise AssertionError("a request came before the cache was allocated")


def _context(resolved: Resolved, world: World, device: torch.device) -> RankContext:
    topology, config = resolved.topology, resolved.model_config
    dtype, kv_dtype, dims = torch_dtype(resolved.dtype), torch_dtype(resolved.kv_dtype), config.head_dims
    seen = seen_dtype(kv_dtype, dtype)
    needs = [
        Need(device=device.type, dtype=seen, head_dim=key, value_dim=value)
        for key, value in dims.of_kernels
    ]
    tp, dcp = world.group(topology.tp_groups()), world.group(topology.dcp_groups())
    return RankContext(
        topology=topology,
        rank=world.rank,
        tp=tp,
        dcp=dcp,
        row_groups=RowGroups.of(world, topology, dcp, ranks_are_homes=resolved.ranks_are_homes),
        exchange=resolved.exchange,
        replicate_q=resolved.replicate_q,
        expert_parallel=resolved.expert_parallel,
        kernel=choose_kernel(*needs),
        storage=Storage(dtype, device),
        cache=CacheFormat(block_size=resolved.block_size, dtype=kv_dtype, computed=dtype, device=device),
        workspace_tokens=resolved.workspace_tokens,
        together_tokens=resolved.together_tokens,
    )


def _prefill_rule(resolved: Resolved) -> PrefillRule:
    return PrefillRule.of(
        resolved.prefill_strategy,
        resolved.model_config,
        resolved.topology,
        exchange=resolved.exchange,
        replicate_q=resolved.replicate_q,
        dtype_bytes=torch_dtype(resolved.dtype).itemsize,
    )


def _workspace(resolved: Resolved, rank: int, device: torch.device) -> Workspace:
    return Workspace(
        tokens=resolved.workspace_tokens,
        dcp_rank=resolved.topology.dcp_rank(rank),
        dcp_size=resolved.dcp_size,
        block_size=resolved.block_size,
        device=device,
    )


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a config's name for it."""
    dtypes = {
        "bfloat16": torch.bfloat16,
        "float16": torch.float16,
        "float32": torch.float32,
        "fp8_e4m3": torch.float8_e4m3fn,
        "int8": torch.int8,
    }
    return dtypes[name]


def rank_device(kind: str, rank: int) -> torch.device:
    """The device of a rank: on CUDA, ranks go round the GPUs of the host."""
    return torch.device(kind, rank % torch.cuda.device_count()) if kind == "cuda" else torch.device(kind)


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)
