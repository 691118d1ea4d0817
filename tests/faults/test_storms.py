"""Crowds: clients that leave at random, queues that overflow, hours of everything at once."""

import asyncio
import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.conftest import SEED
from tests.server.conftest import Running, serving

from kvspan.testing.checkpoints import write_checkpoint, write_tokenizer
from kvspan.testing.tiny import TINY

SOAK_S = float(os.environ.get("KVSPAN_SOAK_S", "20"))
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300 + 2 * SOAK_S)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    write_checkpoint(directory, TINY["llama-gqa"], seed=5)
    write_tokenizer(directory, vocab_size=203)
    return directory


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Running]:
    with serving(model, "--max-queue", "500", "--max-num-seqs", "64") as running:
        yield running


async def post(server: Running, body: dict[str, Any], *, leave_after_s: float | None = None) -> int:
    """Sends a request and reads its reply to the end.

    Args:
        server: to whom.
        body: of the request.
        leave_after_s: hang up after so long, whatever has come.

    Returns:
        The status; 0 if it hung up before one came.
    """
    host, port = server.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    content = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n"
    head += "Content-Type: application/json\r\nConnection: close\r\n\r\n"
    writer.write(head.encode() + content)
    received = b""
    try:
        async with asyncio.timeout(leave_after_s):
            while data := await reader.read(1 << 16):
                received = received or data
    except TimeoutError:
        pass
    finally:
        writer.transport.abort()
    return int(received.split(b" ", 2)[1]) if received else 0


def await_quiet(server: Running) -> None:
    server.await_metric("kvspan_num_requests_waiting", 0)
    server.await_metric("kvspan_num_requests_running", 0)
    server.await_metric("kvspan_kv_used_tokens", 0)


def bodies(rng: random.Random) -> dict[str, Any]:
    """A request of any kind, now and then a bad one."""
    prompt: Any = "".join(rng.choice("abcde ") for _ in range(rng.choice([1, 5, 40, 300, 700])))
    if rng.random() < 0.3:
        prompt = [rng.randrange(3, 203) for _ in range(rng.randrange(1, 400))]
    body = {"prompt": prompt, "max_tokens": rng.choice([1, 8, 40, 120]), "stream": rng.random() < 0.6}
    extras = [
        {"n": 3},
        {"temperature": 0},
        {"stop": ["a", "bc"]},
        {"logprobs": 2, "echo": True},
        {"priority": rng.randrange(-3, 3)},
        {"frequency_penalty": 1.5, "top_p": 0.9},
        {"cache_salt": rng.choice("xy")},
        {"temperature": -1},
        {"nonsense": 1},
    ]
    return body | rng.choice(extras) | rng.choice(extras[:7])


def test_clients_that_leave_at_random(server: Running) -> None:
    rng = random.Random(SEED)

    async def storm() -> None:
        body = {"prompt": "hello", "max_tokens": 400, "ignore_eos": True}
        asked = [body | {"stream": rng.random() < 0.5, "n": rng.choice([1, 1, 2])} for _ in range(200)]
        await asyncio.gather(*(post(server, b, leave_after_s=3 * rng.random()) for b in asked))

    asyncio.run(storm())
    await_quiet(server)


def test_ten_thousand_at_once_are_answered_or_refused(server: Running) -> None:
    async def crowd() -> Counter[int]:
        gate = asyncio.Semaphore(2000)  # connections of this process

        async def one() -> int:
            async with gate:
                return await post(server, {"prompt": "hello", "max_tokens": 4})

        return Counter(await asyncio.gather(*(one() for _ in range(10_000))))

    found = asyncio.run(crowd())
    assert found.keys() <= {200, 429}
    assert found.total() == 10_000
    assert found[200] >= 500
    await_quiet(server)


def test_mixed_load_leaks_nothing(server: Running) -> None:
    """`make soak` runs it for half an hour."""
    rng = random.Random(SEED)
    processes = [psutil.Process(server.process.pid), server.engine]

    async def client(until_s: float, found: Counter[int]) -> None:
        while time.monotonic() < until_s:
            leave = rng.choice([None, None, None, rng.random()])
            found[await post(server, bodies(rng), leave_after_s=leave)] += 1

    def run(seconds: float) -> Counter[int]:
        found: Counter[int] = Counter()

        async def all_clients() -> None:
            until_s = time.monotonic() + seconds
            await asyncio.gather(*(client(until_s, found) for _ in range(48)))

        asyncio.run(all_clients())
        await_quiet(server)
        return found

    run(SOAK_S / 4)  # caches and pools fill once
    before = [process.memory_info().rss for process in processes]
    descriptors = [process.num_fds() for process in processes]
    found = run(SOAK_S)
    assert found.keys() <= {0, 200, 400, 429}
    assert found[200] > 100
    assert found[400] > 10
    grown = [p.memory_info().rss - rss for p, rss in zip(processes, before, strict=True)]
    assert max(grown) < 30e6, grown
    assert all(p.num_fds() <= n + 2 for p, n in zip(processes, descriptors, strict=True))


def test_a_fuzzer_finds_no_error_of_the_servers_own(server: Running) -> None:
    pytest.importorskip("schemathesis", reason="pip install schemathesis")
    code = "from schemathesis.cli import schemathesis; schemathesis()"
    checks = ["--checks", "not_a_server_error", "--max-examples", "30", "--seed", str(SEED)]
    ran = subprocess.run(
        [sys.executable, "-c", code, "run", f"{server.url}/openapi.json", *checks],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout
