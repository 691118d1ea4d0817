"""Ranks as processes: they start, obey, answer in order and end."""

import os
import subprocess
import sys

import msgspec
import psutil
import pytest

from kvspan.errors import EngineDeadError
from kvspan.executor.multiprocess import MultiprocessExecutor
from kvspan.request import SamplingParams
from kvspan.step import Fill, NewRequest, Row, Step
from kvspan.testing.toy_worker import Toy

pytestmark = pytest.mark.timeout(30)


def toys(world_size: int, toy: Toy | None = None, threads_per_rank: int = 1) -> MultiprocessExecutor:
    return MultiprocessExecutor(
        world_size=world_size,
        payload=msgspec.msgpack.encode(toy or Toy()),
        target="kvspan.testing.toy_worker:run",
        step_timeout_s=10,
        start_timeout_s=20,
        threads_per_rank=threads_per_rank,
    )


def step(step_id: int, *tokens: int) -> Step:
    rows = tuple(Row(i, 0, 1, True, (token,)) for i, token in enumerate(tokens))
    return Step(step_id, (), rows, ())


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_ranks_start_obey_and_end(world_size: int) -> None:
    executor = toys(world_size)
    reports = executor.start()
    assert executor.world_size == world_size
    assert [report.rank for report in reports] == list(range(world_size))
    pids = [report.weight_bytes for report in reports]
    assert len({os.getpid(), *pids}) == world_size + 1

    executor.allocate_cache(7)
    for step_id in range(3):
        executor.submit(step(step_id, 10 + step_id, 20))
        result = executor.collect()
        assert result.step_id == step_id
        assert [row.token_id for row in result.rows] == [10 + step_id, 20]

    executor.shutdown()
    assert not any(map(psutil.pid_exists, pids))


def test_what_measures_reaches_every_rank_between_two_steps() -> None:
    executor = toys(3)
    executor.start()
    executor.submit(step(0, 1))
    executor.collect()
    executor.fill(Fill((1, 2), 20, seed=3))
    assert [[span.name for span in rank] for rank in executor.watch(True)] == [
        ["0 True"],
        ["1 True"],
        ["2 True"],
    ]
    executor.submit(step(1, 1))
    assert executor.collect().step_id == 1
    executor.shutdown()


def test_a_rank_has_the_threads_it_was_given_and_leaves_ctrl_c_to_the_driver() -> None:
    executor = toys(2, threads_per_rank=3)
    reports = executor.start()
    executor.shutdown()
    assert [report.free_bytes for report in reports] == [3, 3]
    assert [report.kv_bytes_per_token for report in reports] == [1, 1]


def test_a_step_larger_than_any_socket_buffer_arrives() -> None:
    executor = toys(2)
    executor.start()
    prompt = NewRequest(0, bytes(20_000_000), 5_000_000, SamplingParams(), 0)
    executor.submit(Step(0, (prompt,), (Row(0, 0, 1, True, (1,)),), ()))
    assert executor.collect().step_id == 0
    executor.shutdown()


def test_two_executors_live_side_by_side() -> None:
    one, other = toys(1), toys(2)
    one.start(), other.start()
    one.submit(step(0, 1))
    other.submit(step(1, 2))
    assert other.collect().rows[0].token_id == 2
    assert one.collect().rows[0].token_id == 1
    one.shutdown()
    other.submit(step(2, 3))
    assert other.collect().rows[0].token_id == 3
    other.shutdown()


def test_shutdown_is_idempotent_and_final() -> None:
    executor = toys(2)
    executor.start()
    executor.shutdown()
    executor.shutdown()
    with pytest.raises(EngineDeadError, match="has been shut down"):
        executor.submit(step(0))
    with pytest.raises(EngineDeadError, match="has been shut down"):
        executor.collect()
    with pytest.raises(EngineDeadError, match="has been shut down"):
        executor.allocate_cache(1)


def test_a_call_before_start_says_so() -> None:
    executor = toys(2)
    executor.shutdown()
    with pytest.raises(EngineDeadError, match="has not been started"):
        executor.submit(step(0))


def test_shutdown_waits_for_the_step_under_way() -> None:
    executor = toys(2)
    pids = [report.weight_bytes for report in executor.start()]
    executor.submit(step(0, 1))
    executor.shutdown()
    assert not any(map(psutil.pid_exists, pids))


def test_an_executor_that_is_dropped_leaves_no_process() -> None:
    executor = toys(2)
    pids = [report.weight_bytes for report in executor.start()]
    processes = [psutil.Process(pid) for pid in pids]
    del executor
    _, alive = psutil.wait_procs(processes, timeout=10)
    assert not alive


def test_a_fork_of_the_driver_that_ends_ends_no_rank() -> None:
    ran = subprocess.run([sys.executable, "-c", FORKING], capture_output=True, text=True, timeout=25)
    assert ran.stdout == "still there\n", ran.stderr


FORKING = """
import os, sys
import msgspec
from kvspan.executor.multiprocess import MultiprocessExecutor
from kvspan.step import Step
executor = MultiprocessExecutor(
    world_size=1, payload=msgspec.msgpack.encode({}), target="kvspan.testing.toy_worker:run",
    step_timeout_s=10, start_timeout_s=20, threads_per_rank=1,
)
executor.start()
pid = os.fork()
if pid == 0:
    sys.exit()
os.waitpid(pid, 0)
executor.submit(Step(0, (), (), ()))
executor.collect()
executor.shutdown()
assert "torch" not in sys.modules, "a driver needs no torch"
print("still there")
"""


GUARDLESS = """
import msgspec
from kvspan.executor.multiprocess import MultiprocessExecutor
print("one driver")
executor = MultiprocessExecutor(
    world_size=2, payload=msgspec.msgpack.encode({}), target="kvspan.testing.toy_worker:run",
    step_timeout_s=10, start_timeout_s=20, threads_per_rank=1,
)
print(len(executor.start()), "ranks")
"""


def test_a_script_needs_no_guard_and_no_shutdown(tmp_path) -> None:
    """Its `__main__` runs once, whatever torch.py lies about, and nothing is printed at its end."""
    (tmp_path / "torch.py").write_text("raise ImportError('not torch')")
    ran = subprocess.run(
        [sys.executable, "-P", "-W", "error", "-"],
        input=GUARDLESS,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=25,
        check=True,
    )
    assert ran.stdout == "one driver\n2 ranks\n"
    assert ran.stderr == ""
