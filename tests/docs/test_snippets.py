"""Blocks of README.md and docs/ do what they say when they are pasted.

A fenced block of `sh` or `python` runs if the line above its fence is the comment `<!-- runs -->`. The
blocks of a page run in order, in a directory of their own, with this environment's commands on the path,
and each has to print something and end with exit code 0. A block that is one `kvspan serve ...` stays up
for those behind it; it is given a free port, and `localhost:8000` in them becomes that port. Everything
else is as it stands.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.pages import PAGES, ROOT, Block, blocks

PAGES_THAT_RUN = [page for page in PAGES if any(block.runs for block in blocks(page))]
LIMIT_S = 240  # for a block, on a busy machine


@pytest.mark.weights
@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", PAGES_THAT_RUN, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_is_pasted_runs(page: Path, tmp_path: Path) -> None:
    port = free_port()
    with contextlib.ExitStack() as servers:
        for block in blocks(page):
            if not block.runs:
                continue
            if block.text.startswith("kvspan serve "):
                servers.enter_context(serving(block, port, tmp_path))
            else:
                run(block, port, tmp_path)


def run(block: Block, port: int, directory: Path) -> None:
    text = block.text.replace("localhost:8000", f"localhost:{port}")
    programs = {"python": [sys.executable, "-c", text], "sh": ["sh", "-ec", text]}
    with started(programs[block.language], directory) as process:
        out, error = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 0, f"{block}: {out}{error}"
        assert out.strip(), f"{block} prints nothing"
        assert "Traceback" not in error, f"{block}: {error}"


@contextlib.contextmanager
def serving(block: Block, port: int, directory: Path) -> Iterator[None]:
    """The server of a block, from when it listens until whoever asks is done; it must end by itself."""
    with started(["sh", "-c", f"exec {block.text} --port {port}"], directory) as process:
        said = read_until_it_listens(process)
        assert process.poll() is None, f"{block}: {said}"
        yield
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)  # also reads what it says to the end
        assert process.returncode == 0, f"{block} ended with {process.returncode}"


@contextlib.contextmanager
def started(command: list[str], directory: Path) -> Iterator[subprocess.Popen[str]]:
    """A process as a shell would start it; whatever of it is left in the end is killed."""
    here = str(Path(sys.executable).parent)
    path = f"{here}{os.pathsep}{os.environ['PATH']}"
    with subprocess.Popen(
        command,
        cwd=directory,
        env={**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def read_until_it_listens(process: subprocess.Popen[str]) -> str:
    assert process.stderr is not None
    said = ""
    for line in process.stderr:
        said += line
        if "Serving on http://" in line:
            return said
    process.wait()
    return said


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])
