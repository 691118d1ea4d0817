"""However the driver ends, nobody survives it: kill -9, an exception, Ctrl-C at the terminal."""

import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.timeout(60)

DRIVER = """
import sys
import msgspec
from kvspan.executor.children import fork_server
from kvspan.executor.multiprocess import MultiprocessExecutor
from kvspan.step import Step

toy = {"deeds": {0: sys.argv[1], 2: sys.argv[2]}, "step_id": 0}
if comm := sys.argv[3:]:
    toy |= {"comm": comm[0], "store_path": fork_server().private_path(), "world_size": 3}
executor = MultiprocessExecutor(
    world_size=3,
    payload=msgspec.msgpack.encode(toy),
    target="kvspan.testing.toy_worker:run",
    step_timeout_s=100,
    start_timeout_s=30,
    threads_per_rank=1,
)
executor.start()
executor.submit(Step(0, (), (), ()))
print("ready", flush=True)
"""
WAIT = DRIVER + "executor.collect()\nsys.stdin.read()\n"
FAIL = DRIVER + "raise ArithmeticError('the driver cannot count')\n"


def family(pid: int) -> list[psutil.Process]:
    """The driver, its zygote and three ranks."""
    driver = psutil.Process(pid)
    processes = [driver, *driver.children(recursive=True)]
    assert len(processes) == 5
    return processes


def private_dir(processes: list[psutil.Process]) -> Path:
    """Where ranks meet: the last argument of the zygote."""
    return Path(processes[1].cmdline()[-1])


@pytest.mark.parametrize("comm", [(), ("shm",)], ids=["apart", "shm"])
def test_a_killed_driver_leaves_nothing_behind(comm: tuple[str, ...]) -> None:
    """Of its ranks one spins, one is stopped, and one waits for an order or for the others."""
    command = [sys.executable, "-c", WAIT, "spin", "stop itself", *comm]
    shared = os.listdir("/dev/shm")  # noqa: PTH208
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as driver:
        assert driver.stdout.readline() == b"ready\n"
        processes = family(driver.pid)
        meeting_place = private_dir(processes)
        assert meeting_place.exists()
        driver.kill()
        _, alive = psutil.wait_procs(processes, timeout=10)
        assert not alive
        assert not meeting_place.exists()
        assert os.listdir("/dev/shm") == shared  # noqa: PTH208


def test_a_driver_that_raises_leaves_nothing_behind_and_prints_its_own_traceback_alone() -> None:
    command = [sys.executable, "-c", FAIL, "spin", "stop itself"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert ran.returncode == 1
    assert ran.stderr.count("Traceback") == 1
    assert ran.stderr.endswith("ArithmeticError: the driver cannot count\n")


def test_ctrl_c_is_the_drivers_alone() -> None:
    """Typed at a real terminal, it reaches the whole foreground: the driver prints its traceback."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, "-c", WAIT, "obey", "obey"])
    with open(terminal, "r+b", buffering=0) as screen:  # noqa: PTH123
        shown = screen.read(64)
        while b"ready" not in shown:
            shown += screen.read(64)
        processes = family(pid)
        screen.write(b"\x03")
        try:
            while more := screen.read(1024):
                shown += more
        except OSError:  # how Linux says that the last process has left the terminal
            pass
    _, status = os.waitpid(pid, 0)
    _, alive = psutil.wait_procs(processes, timeout=10)
    assert not alive
    assert os.waitstatus_to_exitcode(status) == -signal.SIGINT
    assert shown.count(b"Traceback") == 1
    assert shown.rstrip().endswith(b"KeyboardInterrupt")
