"""Several engines behind one server: prefixes find theirs, and a dead one takes no traffic."""

import re
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from tests.server.conftest import Running, serving

from kvspan.testing.checkpoints import write_checkpoint, write_tokenizer
from kvspan.testing.tiny import TINY

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Running]:
    write_checkpoint(tmp_path, TINY["llama-gqa"], seed=5)
    write_tokenizer(tmp_path, vocab_size=203)
    with serving(tmp_path, "--data-parallel-size", "2") as running:
        yield running


def outputs(server: Running) -> Counter[str]:
    """Tokens of outputs, by replica."""
    with server.http as client:
        text = client.get("/metrics").text
    found = re.findall(r'^kvspan_generation_tokens_total{replica="(\d)"} (\S+)$', text, re.MULTILINE)
    return Counter({replica: int(float(value)) for replica, value in found})


def ask(server: Running, prompt: str, num_tokens: int = 8) -> int:
    body = {"prompt": prompt, "max_tokens": num_tokens, "ignore_eos": True, "temperature": 0}
    with server.http as client:
        return client.post("/v1/completions", json=body).status_code


def test_replicas(server: Running) -> None:
    agents = [f"agent {i} has a long system prompt of its own" for i in range(4)]
    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(lambda a: ask(server, a, 60), agents)) == {200}
    first = outputs(server)
    assert first.keys() == {"0", "1"}
    assert min(first.values()) >= 60
    for turn in range(3):
        assert ask(server, f"{agents[0]}, turn {turn}") == 200
    assert sorted((outputs(server) - first).values()) == [24]
    assert server.metric("kvspan_prefix_cache_hits_total") >= 3 * 32

    engines = psutil.Process(server.process.pid).children()
    engines[0].kill()
    psutil.wait_procs(engines[:1], timeout=10)
    assert [ask(server, agent) for agent in agents] == [200] * 4
    with server.http as client:
        assert client.get("/ready").status_code == 200
    server.await_metric("kvspan_engine_ready", 2)
    assert server.metric("kvspan_engine_restarts_total") == 1
    assert [ask(server, f"new {i}") for i in range(4)] == [200] * 4
