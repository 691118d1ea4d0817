"""A server as users start it, in a process of its own, with a tiny model; its port and its engine."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import httpx
import openai
import psutil
import pytest

from kvspan.testing.checkpoints import write_checkpoint, write_tokenizer
from kvspan.testing.tiny import TINY

MODEL = "tiny"
LIMIT = 512  # --max-model-len
OPTIONS = (
    *("--kv-cache-memory", "8MiB", "--max-model-len", f"{LIMIT}", "--num-threads", "1"),
    *("--dtype", "float32", "--served-model-name", MODEL, "--port", "0"),
)


@dataclass
class Running:
    """A server under test.

    Args:
        process: of `kvspan serve`.
        url: where it listens.
        said: lines of its stderr.
    """

    process: subprocess.Popen[str]
    url: str
    said: list[str] = field(default_factory=list)

    @property
    def http(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=60)

    @cached_property
    def openai(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    @property
    def engine(self) -> psutil.Process:
        (engine,) = psutil.Process(self.process.pid).children()
        return engine

    def metric(self, name: str) -> float:
        """The sum of a metric over its labels."""
        with self.http as client:
            text = client.get("/metrics").text
        values = re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)
        return sum(map(float, values))

    def sample(self, name: str) -> float:
        """A metric with its labels, as they are written."""
        with self.http as client:
            text = client.get("/metrics").text
        (value,) = re.findall(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)
        return float(value)

    def await_metric(self, name: str, value: float) -> None:
        """Waits until a metric has a value; whoever calls has a time limit."""
        while self.metric(name) != value:
            pass

    def await_said(self, text: str) -> None:
        """Waits until a line of its stderr has a text; whoever calls has a time limit."""
        while not any(text in line for line in tuple(self.said)):
            threading.Event().wait(0.01)  # the reader needs this process's time


@contextlib.contextmanager
def standing_still(process: psutil.Process) -> Iterator[None]:
    """Stops a process for a while; stopped, it would outlive its server."""
    process.suspend()
    try:
        yield
    finally:
        process.resume()


@contextlib.contextmanager
def serving(model: Path, *options: str) -> Iterator[Running]:
    """Starts `kvspan serve` and ends it; it must end by itself then."""
    command = [sys.executable, "-m", "kvspan", "serve", str(model), *OPTIONS, *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        running = Running(process, "")
        for line in process.stderr:
            running.said.append(line)
            if found := re.search(r"Serving on (http://\S+)/v1", line):
                running.url = found[1]
                break
        assert running.url, "".join(running.said)
        reader = threading.Thread(target=lambda: running.said.extend(process.stderr), daemon=True)
        reader.start()
        try:
            yield running
            running.openai.close()
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(20)
            finally:
                process.kill()
        reader.join(5)
        assert not [line for line in running.said if "Traceback" in line], "".join(running.said)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    write_checkpoint(directory, TINY["llama-gqa"], seed=5)
    write_tokenizer(directory, vocab_size=203)
    return directory


@pytest.fixture(scope="session")
def server(model: Path) -> Iterator[Running]:
    with serving(model) as running:
        yield running
