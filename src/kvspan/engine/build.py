"""From what was asked to a running engine: find the model, make the choices, start the ranks."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import torch

from kvspan.comm.group import World
from kvspan.comm.shm import refusal as shm_refusal
from kvspan.config.cores import num_cores
from kvspan.config.engine import EngineConfig
from kvspan.config.model import ModelConfig, parse_model_config, token_ids, with_overrides
from kvspan.config.resolved import Resolved
from kvspan.cost.choose import Machine
from kvspan.cost.choose import resolve as choose
from kvspan.cost.facts import device_of_model, load_devices
from kvspan.engine.core import EngineCore
from kvspan.engine.engine import Engine
from kvspan.errors import ModelError
from kvspan.executor.children import fork_server
from kvspan.executor.inprocess import InProcessExecutor
from kvspan.executor.multiprocess import MultiprocessExecutor
from kvspan.loading.generation import read_generation_config, sampling_defaults
from kvspan.loading.resolve import locate
from kvspan.loading.resolve import resolve as open_checkpoint
from kvspan.loading.tokenizer import Tokenizer, find_tokenizer
from kvspan.models.registry import check_architecture
from kvspan.sampling.grammar import Grammars
from kvspan.step import MeasuredExecutor
from kvspan.worker.main import RankStart
from kvspan.worker.worker import Worker

START_TIMEOUT_S = 3600.0
"""For loading weights and allocating the cache: a large checkpoint on a cold disk takes long."""


def build_engine(asked: EngineConfig, *, told: Callable[[Resolved], None] = lambda _: None) -> Engine:
    """Starts an engine.

    Args:
        asked: options.
        told: called with what will run before it is started, e.g. to print it.

    Raises:
        ModelError: model or tokenizer cannot be found or read.
        ConfigError: it cannot run as asked.
    """
    asked.refuse_replicas()
    resolved, tokenizer = resolve_engine(asked)
    told(resolved)
    grammars = Grammars.of_model(resolved.model_config, tokenizer.to_json if tokenizer else None)
    return Engine(EngineCore(resolved, make_executor(resolved), grammars), tokenizer)


def resolve_engine(asked: EngineConfig) -> tuple[Resolved, Tokenizer | None]:
    """What would run, without starting it.

    Args:
        asked: options.

    Returns:
        All choices, and the model's tokenizer if it has one.

    Raises:
        ModelError: model or tokenizer cannot be found or read.
        ConfigError: it cannot run as asked.
    """
    checkpoint = open_checkpoint(asked.model, asked.load_format, seed=asked.seed)
    raw = with_overrides(checkpoint.raw_config, asked.hf_overrides)
    check_architecture(raw, where=checkpoint.where)
    model = parse_model_config(raw, where=checkpoint.where)
    place = locate(asked.model, weights=asked.load_format != "dummy")
    tokenizer = find_tokenizer(tokenizer_place(asked))
    generation = read_generation_config(asked.generation_config, place)
    ends = (*token_ids(generation.get("eos_token_id")), *(tokenizer.eos_token_ids if tokenizer else ()))
    resolved = choose(
        asked,
        _with_eos(model, ends),
        _share(this_machine(), asked.data_parallel_size),
        sampling_defaults=sampling_defaults(generation, where=asked.model),
    )
    if asked.gpu_memory_utilization is None and resolved.device == "cpu":
        share = resolved.kv_fraction / asked.data_parallel_size
        resolved = msgspec.structs.replace(resolved, kv_fraction=share)
    return resolved, tokenizer


def _share(machine: Machine, num_replicas: int) -> Machine:
    """What one replica has of a machine."""
    return msgspec.structs.replace(machine, cores=max(machine.cores // num_replicas, 1))


def tokenizer_place(asked: EngineConfig) -> Path:
    """Where the model's tokenizer would be, if it has one: a directory or a `.gguf` file."""
    weights = asked.tokenizer is None and asked.load_format != "dummy"
    try:
        return locate(asked.tokenizer or asked.model, weights=weights)
    except ModelError as error:
        raise error if asked.tokenizer is None else ModelError(f"--tokenizer: {error}") from None


def make_executor(resolved: Resolved, *, watched: bool = False) -> MeasuredExecutor:
    """The ranks of a configuration, not started yet.

    Args:
        resolved: what will run.
        watched: whether its ranks can say where their time goes.
    """
    world_size = resolved.topology.world_size
    if resolved.executor == "inprocess":

        def make_worker(world: World) -> Worker:
            return Worker(resolved, world, watched=watched)

        return InProcessExecutor(
            world_size=world_size, make_worker=make_worker, num_threads=resolved.num_threads
        )
    start = RankStart(resolved, fork_server().private_path(), watched)
    return MultiprocessExecutor(
        world_size=world_size,
        payload=msgspec.msgpack.encode(start),
        step_timeout_s=resolved.step_timeout_s,
        start_timeout_s=START_TIMEOUT_S,
        threads_per_rank=resolved.num_threads,
    )


def this_machine() -> Machine:
    """Facts about the machine that ranks will run on."""
    num_gpus = torch.cuda.device_count()
    return Machine(
        cores=num_cores(),
        num_gpus=num_gpus,
        no_shm=shm_refusal(),
        facts=device_of_model(_gpu_model(), load_devices()) if num_gpus else None,
    )


def _gpu_model(listed: Path = Path("/proc/driver/nvidia/gpus")) -> str:
    """What the driver calls the first GPU: torch would make a context on it to say so."""
    for file in sorted(listed.glob("*/information")):
        if match := re.search(r"^Model:\s*(.+)$", file.read_text(), re.MULTILINE):
            return match[1]
    return ""


def _with_eos(model: ModelConfig, more: Sequence[int]) -> ModelConfig:
    """A chat model often ends its turns with a token that its config.json does not name."""
    known = tuple(t for t in dict.fromkeys((*model.eos_token_ids, *more)) if t < model.vocab_size)
    return msgspec.structs.replace(model, eos_token_ids=known)
