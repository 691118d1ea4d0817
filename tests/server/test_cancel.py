"""A client that goes away frees what its request held, whatever the request was doing."""

import json
import selectors
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.conftest import Running, serving, standing_still

pytestmark = pytest.mark.timeout(60)
LONG = {"prompt": "hello", "max_tokens": 400, "ignore_eos": True}


@pytest.fixture(scope="module")
def narrow(model: Path) -> Iterator[Running]:
    """A server whose steps take 4 tokens and 2 requests, so that prompts and queues last."""
    with serving(
        model, "--max-num-seqs", "2", "--max-num-batched-tokens", "4", "--max-queue", "3"
    ) as running:
        yield running


def leave(server: Running, body: dict[str, Any]) -> socket.socket:
    """Sends a request on a connection of its own, for the test to close."""
    host, port = server.url.removeprefix("http://").split(":")
    sock = socket.create_connection((host, int(port)))
    content = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n"
    head += "Content-Type: application/json\r\n\r\n"
    sock.sendall(head.encode() + content)
    return sock


def await_free(server: Running) -> None:
    server.await_metric("kvspan_kv_used_tokens", 0)
    assert server.metric("kvspan_num_requests_running") == 0
    assert server.metric("kvspan_num_requests_waiting") == 0


def test_after_some_chunks_of_a_stream(server: Running) -> None:
    with (
        server.http as client,
        client.stream("POST", "/v1/completions", json=LONG | {"stream": True}) as reply,
    ):
        for _ in zip(range(3), reply.iter_lines(), strict=False):
            pass
    await_free(server)
    assert server.metric("kvspan_request_success_total") == server.metric(
        "kvspan_request_generation_tokens_count"
    )


@pytest.mark.parametrize("stream", [False, True])
def test_what_its_client_left_is_counted(narrow: Running, stream: bool) -> None:
    aborted = 'kvspan_request_success_total{finished_reason="abort"}'
    others = [f'kvspan_request_success_total{{finished_reason="{r}"}}' for r in ("stop", "length")]
    before, ended = narrow.sample(aborted), [narrow.sample(each) for each in others]
    sock = leave(narrow, LONG | {"stream": stream, "n": 2})
    narrow.await_metric("kvspan_num_requests_running", 2)
    sock.close()
    await_free(narrow)
    assert narrow.sample(aborted) == before + 2
    assert [narrow.sample(each) for each in others] == ended


@pytest.mark.parametrize("stream", [False, True])
def test_before_the_reply(narrow: Running, stream: bool) -> None:
    sock = leave(narrow, LONG | {"stream": stream})
    narrow.await_metric("kvspan_num_requests_running", 1)
    sock.close()
    await_free(narrow)


def test_during_a_long_prompt(narrow: Running) -> None:
    """Its client leaves after the first step, while the engine stands still.

    Where the engine had been through by then, since whoever looks was slow, it is tried again.
    """
    prompt_tokens, ended = "kvspan_prompt_tokens_total", "kvspan_request_success_total"
    for attempt in "abcdefghij":  # nothing of the prompt is cached
        given = narrow.metric("kvspan_generation_tokens_total")
        begun, done = narrow.metric(prompt_tokens) + 500, narrow.metric(ended) + 1
        sock = leave(narrow, LONG | {"prompt": attempt + "y" * 499})
        narrow.await_metric(prompt_tokens, begun)
        with standing_still(narrow.engine):
            sock.close()
            narrow.await_metric(ended, done)
        await_free(narrow)
        if narrow.metric("kvspan_generation_tokens_total") == given:
            return
    pytest.fail("Prompts whose clients had left were computed to their ends.")


def test_while_it_waits_and_when_the_queue_is_full(narrow: Running) -> None:
    running = [leave(narrow, LONG) for _ in range(2)]
    narrow.await_metric("kvspan_num_requests_running", 2)
    waiting = [leave(narrow, LONG) for _ in range(3)]
    narrow.await_metric("kvspan_num_requests_waiting", 3)
    with narrow.http as client:
        refused = client.post("/v1/completions", json=LONG)
    assert refused.status_code == 429
    assert int(refused.headers["retry-after"]) >= 1
    assert "--max-queue is 3" in refused.json()["error"]["message"]
    for sock in waiting:
        sock.close()
    narrow.await_metric("kvspan_num_requests_waiting", 0)
    for sock in running:
        sock.close()
    await_free(narrow)


def test_a_lower_priority_value_goes_first(narrow: Running) -> None:
    running = [leave(narrow, LONG) for _ in range(2)]
    narrow.await_metric("kvspan_num_requests_running", 2)
    order: list[int] = []
    socks = {}
    for priority in (5, 0, -5):
        socks[priority] = leave(narrow, LONG | {"max_tokens": 2, "priority": priority})
    narrow.await_metric("kvspan_num_requests_waiting", 3)
    running[0].close()  # one place; the other stays taken
    selector = selectors.DefaultSelector()
    for priority, sock in socks.items():
        selector.register(sock, selectors.EVENT_READ, priority)
    while len(order) < 3:
        for key, _ in selector.select():
            order.append(key.data)
            selector.unregister(key.fileobj)
    assert order == [-5, 0, 5]
    for sock in (*running, *socks.values()):
        sock.close()
    await_free(narrow)


def test_a_client_that_leaves_while_others_stay(server: Running) -> None:
    """The others' text is what it would have been."""
    body = LONG | {"max_tokens": 40, "temperature": 0}
    with server.http as client:
        wanted = client.post("/v1/completions", json=body).json()["choices"][0]["text"]
    leavers = [leave(server, LONG | {"prompt": f"other {i}"}) for i in range(4)]
    server.await_metric("kvspan_num_requests_running", 4)
    with httpx.Client(base_url=server.url, timeout=60) as client:
        for sock in leavers:
            sock.close()
        assert client.post("/v1/completions", json=body).json()["choices"][0]["text"] == wanted
    await_free(server)
