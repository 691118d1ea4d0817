"""A rank that dies, fails, stops or spins ends the executor, with a sentence and without a trace."""

import signal

import msgspec
import psutil
import pytest

from kvspan.clock import WallClock
from kvspan.errors import EngineDeadError, LateError, ModelError
from kvspan.executor.children import fork_server
from kvspan.executor.multiprocess import MultiprocessExecutor
from kvspan.request import SamplingParams
from kvspan.step import NewRequest, Step
from kvspan.testing.toy_worker import Deed, Toy

pytestmark = pytest.mark.timeout(30)

STEP_TIMEOUT_S = 1


@pytest.fixture(autouse=True)
def nobody_left():
    """When a test ends, its zygote has no children."""
    zygote = psutil.Process(fork_server().pid)
    yield
    children = zygote.children() if zygote.is_running() else []
    _, alive = psutil.wait_procs(children, timeout=5)
    assert not alive


def toys(toy: Toy, world_size: int = 3, step_timeout_s: float = 20) -> MultiprocessExecutor:
    return MultiprocessExecutor(
        world_size=world_size,
        payload=msgspec.msgpack.encode(toy),
        target="kvspan.testing.toy_worker:run",
        step_timeout_s=step_timeout_s,
        start_timeout_s=20,
        threads_per_rank=1,
    )


def run(executor: MultiprocessExecutor, num_steps: int, first: int = 0) -> None:
    for step_id in range(first, first + num_steps):
        executor.submit(Step(step_id, (), (), ()))
        assert executor.collect().step_id == step_id


def run_until_it_dies(executor: MultiprocessExecutor, num_steps: int = 5) -> str:
    """The sentence with which the executor dies within some steps."""
    executor.start()
    with pytest.raises(EngineDeadError) as caught:
        run(executor, num_steps)
    with pytest.raises(EngineDeadError, match="The engine has stopped"):
        executor.submit(Step(99, (), (), ()))
    with pytest.raises(EngineDeadError, match="The engine has stopped"):
        executor.collect()
    executor.shutdown()
    return str(caught.value)


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize(
    ("deed", "how"),
    [
        (Deed.EXIT, "ended with exit code 3"),
        (Deed.KILL_ITSELF, "was killed by signal 9 (Killed)"),
        (Deed.RAISE, "failed: ArithmeticError: rank {rank} cannot count"),
    ],
)
def test_a_rank_that_ends_is_named(deed: Deed, how: str, rank: int) -> None:
    told = run_until_it_dies(toys(Toy({rank: deed}, step_id=2)))
    assert told.startswith(f"Step 2: rank {rank} {how.format(rank=rank)}")
    assert "The engine has stopped; all 3 ranks have been ended." in told
    assert ("in _do" in told) == (deed is Deed.RAISE)  # its traceback, and no other


@pytest.mark.parametrize("comm", ["gloo", "shm"])
def test_the_rank_that_died_is_named_and_not_those_that_complain_of_it(comm: str) -> None:
    """Its neighbours wait for it in a collective; gloo's fails when its sockets close."""
    store_path = fork_server().private_path()
    toy = Toy({1: Deed.KILL_ITSELF}, step_id=2, store_path=store_path, world_size=3, comm=comm)
    told = run_until_it_dies(toys(toy))
    assert told.startswith("Step 2: rank 1 was killed by signal 9")
    assert "rank 0 |" not in told


@pytest.mark.parametrize("deed", [Deed.STOP_ITSELF, Deed.SPIN])
def test_ranks_that_do_not_answer_are_named_in_time(deed: Deed) -> None:
    clock = WallClock()
    start_s = clock.now_s()
    told = run_until_it_dies(toys(Toy({0: deed, 2: deed}, step_id=1), step_timeout_s=STEP_TIMEOUT_S))
    assert told.startswith("Step 1: ranks 0, 2 have not answered within 1 s (--step-timeout 1).")
    assert ("ranks 0, 2 have been stopped by a signal" in told) == (deed is Deed.STOP_ITSELF)
    assert clock.now_s() - start_s < 10


@pytest.mark.parametrize(("deed", "kind"), [(Deed.SPIN, LateError), (Deed.STOP_ITSELF, EngineDeadError)])
def test_ranks_that_may_be_at_work_are_late_and_stopped_ones_are_not(
    deed: Deed, kind: type[EngineDeadError]
) -> None:
    executor = toys(Toy({0: deed}, step_id=0), step_timeout_s=STEP_TIMEOUT_S)
    executor.start()
    executor.submit(Step(0, (), (), ()))
    with pytest.raises(EngineDeadError) as ended:
        executor.collect()
    assert ended.type is kind


@pytest.mark.parametrize("comm", ["gloo", "shm"])
def test_a_stopped_rank_is_told_from_those_that_wait_for_it(comm: str) -> None:
    store_path = fork_server().private_path()
    toy = Toy({1: Deed.STOP_ITSELF}, step_id=1, store_path=store_path, world_size=3, comm=comm)
    told = run_until_it_dies(toys(toy, step_timeout_s=STEP_TIMEOUT_S))
    assert told.startswith("Step 1: ranks 0, 1, 2 have not answered within 1 s")
    assert "rank 1 has been stopped by a signal" in told


@pytest.mark.parametrize("deed", [Deed.KILL_ITSELF, Deed.STOP_ITSELF])
def test_an_exchange_ends_by_itself_and_says_who_has_not_come(deed: Deed) -> None:
    """Before the driver gives up; a killed rank may be noticed by the driver first."""
    store_path = fork_server().private_path()
    toy = Toy(
        {1: deed}, step_id=1, store_path=store_path, world_size=3, comm="shm", patience_s=STEP_TIMEOUT_S
    )
    told = run_until_it_dies(toys(toy))
    assert "rank 1 was killed by signal 9" in told or (
        "TimeoutError: Rank 1 has not come to an exchange of ranks 0, 1, 2 within 1 s." in told
    )


def test_a_step_that_a_stopped_rank_cannot_take_does_not_block_for_ever() -> None:
    """It is larger than the socket's buffer, so that sending it waits for the rank."""
    executor = toys(Toy(), step_timeout_s=STEP_TIMEOUT_S)
    stopped = psutil.Process(executor.start()[1].weight_bytes)
    stopped.suspend()
    prompt = NewRequest(0, bytes(20_000_000), 5_000_000, SamplingParams(), 0)
    with pytest.raises(EngineDeadError, match="rank 1 has not answered within"):
        executor.submit(Step(1, (prompt,), (), ()))


def test_what_a_rank_refuses_to_load_is_raised_as_it_was() -> None:
    executor = toys(Toy({0: Deed.REFUSE, 1: Deed.REFUSE, 2: Deed.REFUSE}))
    with pytest.raises(ModelError) as caught:
        executor.start()
    assert str(caught.value) == "toy.safetensors: 3 bytes are missing."
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__
    executor.shutdown()


@pytest.mark.parametrize(
    ("deed", "how"),
    [
        (Deed.EXIT, "Loading: rank 1 ended with exit code 3"),
        (Deed.RAISE, "Loading: rank 1 failed: ArithmeticError"),
        (Deed.KILL_ITSELF, "Loading: rank 1 was killed by signal 9"),
    ],
)
def test_a_rank_that_ends_while_loading_is_named(deed: Deed, how: str) -> None:
    with pytest.raises(EngineDeadError) as caught:
        toys(Toy({1: deed})).start()
    assert str(caught.value).startswith(how)


def test_a_payload_that_no_rank_understands_is_an_error() -> None:
    executor = toys(Toy())
    executor._payload = b"\xc1"
    with pytest.raises(EngineDeadError, match=r"Loading: rank \d failed: DecodeError"):
        executor.start()


def test_a_rank_that_cannot_allocate_is_named() -> None:
    executor = toys(Toy())
    executor.start()
    with pytest.raises(
        EngineDeadError, match=r"Allocating the cache: rank \d failed: MemoryError: -1 blocks"
    ):
        executor.allocate_cache(-1)


def test_a_rank_killed_between_steps_is_noticed_at_the_next() -> None:
    executor = toys(Toy())
    victim = psutil.Process(executor.start()[2].weight_bytes)
    run(executor, 1)
    victim.kill()
    psutil.wait_procs([victim], timeout=5)
    with pytest.raises(EngineDeadError, match="Step 1: rank 2 was killed by signal 9"):
        run(executor, 1, first=1)


def test_a_killed_fork_server_is_noticed() -> None:
    executor = toys(Toy({0: Deed.SPIN}, step_id=0))
    processes = [psutil.Process(report.weight_bytes) for report in executor.start()]
    executor.submit(Step(0, (), (), ()))
    psutil.Process(fork_server().pid).kill()
    with pytest.raises(EngineDeadError, match="went down with its fork-server"):
        executor.collect()
    _, alive = psutil.wait_procs(processes, timeout=5)
    assert not alive


def test_a_rank_that_does_not_end_politely_is_killed(monkeypatch) -> None:
    monkeypatch.setattr("kvspan.executor.multiprocess._GRACE_S", 0.3)
    executor = toys(Toy(deaf=True))
    pids = [report.weight_bytes for report in executor.start()]
    executor.shutdown()
    assert not any(map(psutil.pid_exists, pids))


def test_ctrl_c_while_waiting_leaves_an_executor_that_can_be_shut_down(monkeypatch) -> None:
    monkeypatch.setattr("kvspan.executor.multiprocess._GRACE_S", 0.3)
    executor = toys(Toy({1: Deed.SPIN}, step_id=0))
    pids = [report.weight_bytes for report in executor.start()]
    executor.submit(Step(0, (), (), ()))
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    with pytest.raises(KeyboardInterrupt):
        executor.collect()
    signal.signal(signal.SIGALRM, before)
    executor.shutdown()
    assert not any(map(psutil.pid_exists, pids))
