"""Lost ranks and lost engines: streams pause and go on, or end with an error; nothing stays behind."""

import contextlib
import json
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from tests.server.conftest import Running, serving, standing_still

from kvspan.testing.checkpoints import write_checkpoint, write_tokenizer
from kvspan.testing.tiny import TINY

pytestmark = pytest.mark.timeout(120)
TWO = ("-tp", "2", "-dcp", "2", "--step-timeout", "3")
PROMPTS = ("hello", "other words", "x")


@pytest.fixture
def server(model: Path) -> Iterator[Running]:
    with serving(model, *TWO) as running:
        yield running


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    write_checkpoint(directory, TINY["llama-gqa-9x3"], seed=1)
    write_tokenizer(directory, vocab_size=203)
    return directory


def ranks(server: Running) -> list[psutil.Process]:
    """The children of the engine's fork-server."""
    (zygote,) = server.engine.children()
    found = zygote.children()
    assert len(found) == 2
    return found


class Streams(threading.Thread):
    """Reads streams of some prompts side by side; `begun` is set when each has tokens."""

    def __init__(self, server: Running, num_tokens: int = 300) -> None:
        super().__init__()
        self._server, self._num_tokens = server, num_tokens
        self.texts: dict[str, str] = dict.fromkeys(PROMPTS, "")
        self.errors: dict[str, Any] = {}
        self.begun = {prompt: threading.Event() for prompt in PROMPTS}

    def run(self) -> None:
        threads = [threading.Thread(target=self._read, args=(p,)) for p in PROMPTS]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _read(self, prompt: str) -> None:
        try:
            self._stream(prompt)
        except httpx.HTTPError as error:
            self.errors[prompt] = {"message": str(error)}
        self.begun[prompt].set()

    def _stream(self, prompt: str) -> None:
        body = {"prompt": prompt, "max_tokens": self._num_tokens, "ignore_eos": True, "stream": True}
        body |= {"temperature": 0.8, "seed": 7}
        with self._server.http as client, client.stream("POST", "/v1/completions", json=body) as reply:
            if reply.status_code != 200:
                self.errors[prompt] = json.loads(reply.read())["error"]
            for line in reply.iter_lines():
                if not line.startswith("data: {"):
                    continue
                chunk = json.loads(line.removeprefix("data: "))
                if "error" in chunk:
                    self.errors[prompt] = chunk["error"]
                    continue
                self.texts[prompt] += chunk["choices"][0]["text"]
                if len(self.texts[prompt]) > 5:
                    self.begun[prompt].set()


def under_way(server: Running) -> Streams:
    streams = Streams(server)
    streams.start()
    for event in streams.begun.values():
        assert event.wait(30)
    return streams


@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)])
def test_a_lost_rank_loses_no_request(server: Running, how: signal.Signals) -> None:
    undisturbed = Streams(server)
    undisturbed.start()
    undisturbed.join(60)
    streams = under_way(server)
    before = ranks(server)
    os.kill(before[1].pid, how)
    streams.join(60)
    assert streams.errors == {}
    assert streams.texts == undisturbed.texts
    assert server.metric("kvspan_engine_restarts_total") == 1
    assert {p.pid for p in ranks(server)}.isdisjoint({p.pid for p in before})
    server.await_said("Engine 0: ")
    server.await_said("Its ranks work again.")
    with server.http as client:
        assert client.get("/ready").status_code == 200


@pytest.mark.slow
def test_ready_tells_the_truth_while_ranks_are_started_again(server: Running) -> None:
    streams = under_way(server)
    seen = set()
    ranks(server)[0].kill()
    with server.http as client:
        while streams.is_alive():
            seen.add(client.get("/ready").status_code)
            assert client.get("/health").status_code == 200
        assert seen == {200, 503}
        assert client.get("/ready").json() == {"ready": True, "why": ""}
    assert streams.errors == {}


@pytest.mark.slow
def test_a_rank_lost_while_nobody_asks_is_started_again(server: Running) -> None:
    before = ranks(server)
    before[1].kill()
    server.await_metric("kvspan_engine_restarts_total", 1)
    server.await_metric("kvspan_engine_ready", 1)
    again = Streams(server, num_tokens=10)
    again.start()
    again.join(30)
    assert again.errors == {}
    assert server.metric("kvspan_engine_restarts_total") == 1


@pytest.mark.slow
def test_without_restarts_streams_end_with_an_error_and_the_server_too(model: Path) -> None:
    with serving(model, *TWO, "--no-restart") as server:
        family = [psutil.Process(server.process.pid), *server.engine.children(recursive=True)]
        streams = under_way(server)
        ranks(server)[0].kill()
        streams.join(30)
        assert streams.errors.keys() == set(PROMPTS)
        assert all("rank 0" in error["message"] for error in streams.errors.values())
        assert server.process.wait(20) == 1
        _, alive = psutil.wait_procs(family, timeout=10)
        assert not alive


@pytest.mark.slow
def test_a_killed_engine_is_started_again_and_its_streams_go_on(server: Running) -> None:
    undisturbed = Streams(server)
    undisturbed.start()
    undisturbed.join(60)
    shared = set(os.listdir("/dev/shm"))  # noqa: PTH208
    streams = under_way(server)
    family = [server.engine, *server.engine.children(recursive=True)]
    server.engine.kill()
    streams.join(60)
    assert streams.errors == {}
    assert streams.texts == undisturbed.texts
    _, alive = psutil.wait_procs(family, timeout=10)
    assert not alive
    server.await_metric("kvspan_engine_ready", 1)
    server.await_said("was killed by signal 9 (Killed); if nobody did that, memory may have run out.")
    server.await_said("The engine is being started again.")
    server.await_said("It works again.")
    again = Streams(server, num_tokens=20)
    again.start()
    again.join(60)
    assert again.errors == {}
    assert all(again.texts.values())
    assert len(set(os.listdir("/dev/shm")) - shared) <= 1  # noqa: PTH208


def test_who_comes_while_the_engine_is_started_again_waits_like_any_other(model: Path) -> None:
    body = {"prompt": "hello", "max_tokens": 5, "temperature": 0}

    def ask() -> httpx.Response:
        with server.http as client:
            return client.post("/v1/completions", json=body)

    with serving(model, *TWO, "--max-num-seqs", "1", "--max-queue", "1") as server:
        wanted = ask().json()["choices"][0]["text"]
        lost = server.engine
        lost.kill()
        again = await_engine(server, other_than=lost)
        with ThreadPoolExecutor(2) as pool:
            with standing_still(again):  # until everybody has come
                waiting = [pool.submit(ask) for _ in range(2)]
                server.await_metric("kvspan_num_requests_waiting", 2)
                assert ask().status_code == 429
                with server.http as client:
                    assert client.get("/health").status_code == 200
                    assert client.get("/ready").status_code == 503
            replies = [each.result() for each in waiting]
        assert [reply.status_code for reply in replies] == [200, 200]
        assert [reply.json()["choices"][0]["text"] for reply in replies] == [wanted] * 2
        assert server.metric("kvspan_engine_restarts_total") == 1


def await_engine(server: Running, *, other_than: psutil.Process) -> psutil.Process:
    """The engine that is started in place of another one, as soon as it runs a program of its own."""
    while True:
        for child in psutil.Process(server.process.pid).children():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                if child.pid != other_than.pid and "kvspan.engine.service" in child.cmdline():
                    return child
        threading.Event().wait(0.01)  # the server needs this machine's time


def test_a_stopped_engine_is_lost_though_no_step_is_long(model: Path) -> None:
    with serving(model, *TWO, "--engine-timeout", "6") as server:
        stopped = server.engine
        streams = under_way(server)
        family = [stopped, *stopped.children(recursive=True)]
        stopped.suspend()
        streams.join(60)
        assert streams.errors == {}
        server.await_said("--engine-timeout")
        _, alive = psutil.wait_procs(family, timeout=10)
        assert not alive
        server.await_metric("kvspan_engine_ready", 1)
        assert server.metric("kvspan_engine_restarts_total") == 1
        again = Streams(server, num_tokens=10)
        again.start()
        again.join(60)
        assert again.errors == {}


@pytest.mark.slow
def test_a_killed_server_leaves_nothing_behind(model: Path) -> None:
    with serving(model, *TWO) as server:
        under_way(server)
        family = psutil.Process(server.process.pid).children(recursive=True)
        assert len(family) == 4
        server.process.kill()
        _, alive = psutil.wait_procs(family, timeout=10)
        assert not alive


@pytest.mark.slow
def test_the_first_sigterm_drains_and_the_second_ends(server: Running) -> None:
    streams = under_way(server)
    server.process.send_signal(signal.SIGTERM)
    with server.http as client:
        while client.get("/ready").status_code == 200:
            pass
        refused = client.post("/v1/completions", json={"prompt": "x"})
    assert refused.status_code == 503
    server.await_said(f"Draining: {len(PROMPTS)} request(s) running; Ctrl-C again ends them.")
    assert "retry-after" in refused.headers
    streams.join(60)
    assert streams.errors == {}
    assert server.process.wait(20) == 0


@pytest.mark.slow
def test_the_second_sigterm_ends_what_runs(server: Running) -> None:
    streams = Streams(server, num_tokens=480)
    streams.start()
    for event in streams.begun.values():
        assert event.wait(30)
    server.process.send_signal(signal.SIGTERM)
    with server.http as client:
        while client.get("/ready").status_code == 200:
            pass
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(20) == 0
    server.await_said(f"Ending: {len(PROMPTS)} request(s) are cut off.")
    streams.join(20)
