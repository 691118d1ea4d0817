"""Blocks of README.md and docs/ do what they say when they are pasted.

A fenced block of `sh` or `python` runs if the line above its fence is the comment `<!-- runs -->`. The
blocks of a page run in order, in a directory of their own, with this environment's commands on the path, and
each has to end with exit code 0. A block that is one `kvspan serve ...` stays up for those behind it; it is
given a free port, and `localhost:8000` in them becomes that port. Everything else is as it stands.
"""

import contextlib
import os
import re
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
    ran = subprocess.run(
        programs[block.language],
        cwd=directory,
        env=environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert ran.returncode == 0, f"{block}: {ran.stdout}{ran.stderr}"
    assert ran.stdout.strip(), f"{block} prints nothing"
    assert "Traceback" not in ran.stderr, f"{block}: {ran.stderr}"


@contextlib.contextmanager
def serving(block: Block, port: int, directory: Path) -> Iterator[None]:
    """The server of a block, from when it listens until whoever asks is done; it must end by itself."""
    command = ["sh", "-c", f"exec {block.text} --port {port}"]
    with subprocess.Popen(
        command, cwd=directory, env=environment(), stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            said = read_until_it_listens(process)
            assert process.poll() is None, f"{block}: {said}"
            yield
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.communicate(timeout=30)  # also reads what it says to the end
            finally:
                process.kill()


def read_until_it_listens(process: subprocess.Popen[str]) -> str:
    assert process.stderr is not None
    said = ""
    for line in process.stderr:
        said += line
        if re.search(r"Serving on http://", line):
            return said
    process.wait()
    return said


def environment() -> dict[str, str]:
    here = str(Path(sys.executable).parent)
    return {**os.environ, "PATH": f"{here}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])
