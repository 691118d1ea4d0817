"""A rank of a running engine is killed, or stops: every request ends with a sentence, no rank stays."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from kvspan import LLM, EngineDeadError, SamplingParams
from kvspan.executor.children import fork_server
from kvspan.testing.checkpoints import write_checkpoint
from kvspan.testing.tiny import TINY

PARAMS = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)


@pytest.fixture
def llm(tmp_path: Path) -> Iterator[LLM]:
    write_checkpoint(tmp_path, TINY["llama-gqa-9x3"], seed=1)
    options = {"kv_cache_memory": "8MiB", "max_model_len": 256, "step_timeout": 3}
    with LLM(
        str(tmp_path), tensor_parallel_size=2, decode_context_parallel_size=2, **options
    ) as running:
        yield running


def ranks() -> list[psutil.Process]:
    return psutil.Process(fork_server().pid).children()


def interrupted(llm: LLM, deed: Callable[[int], None]) -> str:
    """Does a deed to rank 1 in mid-generation; what the user is told."""
    before = ranks()
    assert len(before) == 2
    pieces = llm.stream([5, 6, 7], PARAMS)
    other = llm.engine.prepare([8, 9], PARAMS)
    llm.engine.start(other)
    next(pieces)
    deed(before[1].pid)
    with pytest.raises(EngineDeadError) as told:
        for _ in pieces:
            pass
    gone, alive = psutil.wait_procs(before, timeout=10)
    assert len(gone) == 2
    assert not alive
    assert not llm.engine.has_work
    with pytest.raises(EngineDeadError):
        llm.generate([[1, 2]], PARAMS, use_tqdm=False)
    return str(told.value)


def test_a_killed_rank(llm: LLM) -> None:
    told = interrupted(llm, lambda pid: os.kill(pid, signal.SIGKILL))
    assert "rank" in told
    assert "SIGKILL" in told or "signal 9" in told


def test_a_stopped_rank(llm: LLM) -> None:
    told = interrupted(llm, lambda pid: os.kill(pid, signal.SIGSTOP))
    assert "--step-timeout 3" in told
