"""The fork-server: one for a driver, without threads, quick to fork, and replaced when it dies."""

import signal
from pathlib import Path

import msgspec
import psutil
import pytest

from kvspan.clock import WallClock
from kvspan.errors import EngineDeadError
from kvspan.executor.children import Child, ForkServer, fork_server
from kvspan.executor.zygote import NUMBER
from kvspan.testing.toy_worker import Toy
from kvspan.worker.messages import Channel, Failed, Load, Report, decode_answer, encode

pytestmark = pytest.mark.timeout(30)

TARGET = "kvspan.testing.toy_worker:run"


def load(child: Child) -> Report | Failed:
    channel = Channel(child.channel)
    channel.send(msgspec.msgpack.encode(Toy()))
    channel.send(encode(Load()))
    answer = decode_answer(channel.receive())
    assert isinstance(answer, Report | Failed)
    return answer


def told(child: Child) -> int:
    """The next number on the leash."""
    return NUMBER.unpack(child.leash.recv(NUMBER.size))[0]


def test_the_zygote_forks_from_one_thread_and_tells_pid_and_exit_code() -> None:
    server = fork_server()
    child = server.fork(TARGET, rank=3, num_threads=1)
    report = load(child).report
    assert report.rank == 3
    assert told(child) == report.weight_bytes
    assert psutil.Process(server.pid).num_threads() == 1
    child.channel.close()  # a rank whose driver hangs up ends as if told to
    assert told(child) == 0
    assert child.leash.recv(1) == b""
    child.close()


def test_a_warm_zygote_forks_in_no_time() -> None:
    load(first := fork_server().fork(TARGET, rank=0, num_threads=1))
    first.close()
    clock = WallClock()
    start_s = clock.now_s()
    load(second := fork_server().fork(TARGET, rank=0, num_threads=1))
    took_s = clock.now_s() - start_s
    second.close()
    assert took_s < 1.2  # it is about 0.02; importing torch again takes 1.3 and more


def test_a_shut_leash_kills_even_a_stopped_rank() -> None:
    child = fork_server().fork(TARGET, rank=0, num_threads=1)
    psutil.Process(told(child)).send_signal(signal.SIGSTOP)
    child.kill()
    child.kill()
    assert told(child) == -signal.SIGKILL
    child.close()
    child.kill()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_everybody_ends_ranks_but_not_the_server_that_tidies_up(number: int) -> None:
    child = fork_server().fork(TARGET, rank=0, num_threads=1)
    rank = psutil.Process(load(child).report.weight_bytes)
    zygote = psutil.Process(fork_server().pid)
    zygote.send_signal(number)
    rank.send_signal(number)
    told(child)
    assert told(child) == -number  # the zygote has lived to tell
    child.close()


def test_closing_the_server_ends_its_ranks_and_removes_its_private_paths() -> None:
    server = ForkServer()
    one, other = Path(server.private_path()), Path(server.private_path())
    assert one != other
    one.write_text("met")
    children = [server.fork(TARGET, rank=rank, num_threads=1) for rank in range(2)]
    processes = [psutil.Process(load(child).report.weight_bytes) for child in children]
    processes[0].suspend()
    server.close()
    _, alive = psutil.wait_procs(processes, timeout=10)
    assert not alive
    assert not one.parent.exists()
    for child in children:
        child.close()


def test_a_killed_server_takes_its_ranks_along_and_the_next_call_gets_another() -> None:
    old = fork_server()
    assert fork_server() is old
    child = old.fork(TARGET, rank=0, num_threads=1)
    process = psutil.Process(load(child).report.weight_bytes)
    zygote = psutil.Process(old.pid)
    zygote.kill()
    _, alive = psutil.wait_procs([process], timeout=10)
    assert not alive
    child.close()
    psutil.wait_procs([zygote], timeout=10)
    with pytest.raises(EngineDeadError, match="fork-server"):
        old.fork(TARGET, rank=0, num_threads=1)
    new = fork_server()
    assert new is not old
    load(child := new.fork(TARGET, rank=0, num_threads=1))
    child.close()


def test_an_unknown_target_is_told_as_a_failure() -> None:
    child = fork_server().fork("kvspan.testing.nowhere:run", rank=2, num_threads=1)
    failed = load(child)
    assert failed.rank == 2
    assert failed.sentence == "ModuleNotFoundError: No module named 'kvspan.testing.nowhere'"
    told(child)
    assert told(child) == 1
    child.close()
