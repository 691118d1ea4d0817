"""Whatever is sent, the answer is a sentence in OpenAI's shape, or a closed connection."""

import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from kvspan.server.errors import add_handlers
from tests.server.conftest import Running, serving

pytestmark = pytest.mark.timeout(60)
JSON = {"Content-Type": "application/json"}
HEADER_TIMEOUT_S, BODY_TIMEOUT_S = 0.5, 1.0
CLOCK_S = 0.02  # an event loop's timers count from the last time that it looked at its clock


@pytest.fixture(scope="module")
def guarded(model: Path) -> Iterator[Running]:
    options = ("--api-key", "one,two", "--header-timeout", f"{HEADER_TIMEOUT_S}")
    with serving(
        model,
        *options,
        *("--body-timeout", f"{BODY_TIMEOUT_S}"),
        *("--max-body-size", "100KB", "--allowed-origins", "https://a.example"),
        *("--max-num-seqs", "2", "--max-queue", "4"),
    ) as server:
        yield server


def connect(server: Running) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=20)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
        b"[" * 100_000,
        b'{"prompt":' + b"[" * 20_000 + b"]" * 20_000 + b"}",
        b'{"prompt": "x", "temperature": NaN}',
        b'{"prompt": "x", "temperature": 1e999}',
        b'{"prompt": [1, 99999999999999999999999]}',
        b'{"prompt": "x", "seed": 99999999999999999999999}',
        b'{"prompt": "x", "n": 1000000}',
    ],
    ids=range(14),
)
def test_a_bad_body_is_a_sentence(server: Running, content: bytes) -> None:
    with server.http as client:
        reply = client.post("/v1/completions", content=content, headers=JSON)
    assert reply.status_code == 400, reply.text
    message = reply.json()["error"]["message"]
    assert "\n" not in message
    assert len(message) < 400


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'{"prompt": "ab\xff"}', "no UTF-8: byte 0xff at 14"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"prompt": ', "no valid JSON"),
    ],
    ids=["no UTF-8", "deep", "half"],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages"])
def test_a_body_that_cannot_be_read_is_told_why(
    server: Running, path: str, content: bytes, said: str
) -> None:
    with server.http as client:
        reply = client.post(path, content=content, headers=JSON)
    assert reply.status_code == 400
    assert said in reply.json()["error"]["message"]
    assert (reply.json().get("type") == "error") == (path == "/v1/messages")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/messages"])
def test_a_body_without_its_header_is_told_which(server: Running, path: str) -> None:
    form = {"Content-Type": "application/x-www-form-urlencoded"}  # what curl sends if nobody says
    with server.http as client:
        reply = client.post(path, content=b'{"prompt": "x"}', headers=form)
    assert reply.status_code == 400
    assert "the header Content-Type: application/json" in reply.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("completions", {"prompt": "x", "temprature": 1}, "did you mean temperature?"),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "messages[0].content has a part of type 'text' without text.",
        ),
    ],
    ids=["field", "part"],
)
def test_sentences_end_once_and_blame_what_is_wrong(
    server: Running, path: str, body: dict[str, object], said: str
) -> None:
    with server.http as client:
        reply = client.post(f"/v1/{path}", json=body)
    assert reply.status_code == 400
    assert reply.json()["error"]["message"].endswith(said)


def test_more_outputs_than_could_ever_wait_are_no_matter_of_time(guarded: Running) -> None:
    body = {"prompt": ["a", "b", "c"], "n": 3}
    with guarded.http as client:
        reply = client.post("/v1/completions", json=body, headers={"x-api-key": "one"})
    assert reply.status_code == 400
    message = reply.json()["error"]["message"]
    assert "asks for 9 outputs" in message
    assert "room for 6: 2 that run (--max-num-seqs) and 4 that wait (--max-queue)" in message


def test_clients_of_anthropic_are_refused_in_their_own_shape(guarded: Running) -> None:
    hello = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    key = {"x-api-key": "one"}
    with guarded.http as client:
        refusals = [
            (client.post("/v1/messages", json=hello), 401, "authentication_error"),
            (client.post("/v1/messages/count_tokens", json=hello), 401, "authentication_error"),
            (
                client.post("/v1/messages", content=b"x" * 200_000, headers=key),
                413,
                "request_too_large",
            ),
            (
                client.post("/v1/messages", json=hello | {"max_tokens": "4"}, headers=key),
                400,
                "invalid_request_error",
            ),
            (client.post("/v1/messages/other", headers=key), 404, "not_found_error"),
            (
                client.post("/v1/messages", json=hello | {"model": "x"}, headers=key),
                404,
                "not_found_error",
            ),
        ]
    for reply, status, kind in refusals:
        assert reply.status_code == status
        assert set(reply.json()) == {"type", "error"}
        assert reply.json()["error"]["type"] == kind
    assert "x-api-key: KEY" in refusals[0][0].json()["error"]["message"]


def test_after_an_unforeseen_error_the_connection_says_that_it_closes() -> None:
    app = FastAPI()
    add_handlers(app)

    @app.get("/broken")
    async def broken() -> None:
        raise ArithmeticError("cannot count")

    client = TestClient(app, raise_server_exceptions=False)
    reply = client.get("/broken")
    assert reply.status_code == 500
    assert reply.headers["connection"] == "close"
    assert reply.json()["error"]["type"] == "server_error"


def test_a_body_of_100_mb_is_not_read(server: Running) -> None:
    with connect(server) as sock:
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100000000\r\n\r\n"
        sock.sendall(head.encode())
        assert b" 413 " in sock.recv(4096)


def test_a_body_that_does_not_tell_its_size_is_cut_off(guarded: Running) -> None:
    def body() -> Iterator[bytes]:
        for _ in range(3):
            yield b"x" * 50_000

    with guarded.http as client:
        reply = client.post("/v1/completions", content=body(), headers={**JSON, "x-api-key": "one"})
    assert reply.status_code == 413
    assert "--max-body-size" in reply.json()["error"]["message"]


def test_keys(guarded: Running) -> None:
    with guarded.http as client:
        for sent in ({}, {"Authorization": "Bearer three"}, {"Authorization": "Basic one"}):
            reply = client.get("/v1/models", headers=sent)
            assert reply.status_code == 401
            assert reply.json()["error"]["code"] == "invalid_api_key"
        for sent in (
            {"Authorization": "Bearer one"},
            {"Authorization": "bearer two"},
            {"x-api-key": "two"},
        ):
            assert client.get("/v1/models", headers=sent).status_code == 200
        assert client.get("/health").status_code == 200
        assert client.get("/ready").json() == {"ready": True, "why": ""}


def test_other_pages_may_call_it_only_if_asked(server: Running, guarded: Running) -> None:
    origin = {"Origin": "https://a.example"}
    with server.http as client:
        assert "access-control-allow-origin" not in client.get("/health", headers=origin).headers
    with guarded.http as client:
        allowed = client.get("/health", headers=origin).headers["access-control-allow-origin"]
        assert allowed == "https://a.example"
        shown = client.get("/health", headers=origin).headers["access-control-expose-headers"]
        assert "x-kvspan-note" in shown
        other = client.get("/health", headers={"Origin": "https://b.example"})
        assert "access-control-allow-origin" not in other.headers


@pytest.mark.parametrize(
    ("sent", "limit_s"),
    [
        (b"", HEADER_TIMEOUT_S),
        (b"POST /v1/comp", HEADER_TIMEOUT_S),
        (b"GET /health HTTP/1.1\r\nHost: x\r\nX-Slow: ", HEADER_TIMEOUT_S),
        (
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nx-api-key: one\r\nContent-Length: 10\r\n\r\n{",
            BODY_TIMEOUT_S,
        ),
    ],
    ids=["nothing", "half a line", "half a head", "half a body"],
)
def test_a_slow_client_is_cut_off(guarded: Running, sent: bytes, limit_s: float) -> None:
    begun_s = time.monotonic()
    with connect(guarded) as sock:
        sock.sendall(sent)
        received = b"".join(iter(lambda: sock.recv(4096), b""))  # until the server closes
    stood_s = time.monotonic() - begun_s
    assert stood_s > limit_s - CLOCK_S
    assert received == b""  # who has not asked to the end is told nothing
    with guarded.http as client:
        assert client.get("/health").status_code == 200


def test_it_listens_on_this_machine_alone(server: Running) -> None:
    assert server.url.startswith("http://127.0.0.1:")


def test_unknown_paths_and_methods(server: Running) -> None:
    with server.http as client:
        for reply, status in (
            (client.get("/nothing"), 404),
            (client.get("/v1/completions"), 405),
            (client.get("/v1/models/other"), 404),
        ):
            assert reply.status_code == status
            assert reply.json()["error"]["message"]


def test_what_it_says_of_itself(server: Running) -> None:
    with server.http as client:
        names = [card["id"] for card in client.get("/v1/models").json()["data"]]
        assert names[0] == "tiny"
        assert client.get("/v1/models/tiny").json()["max_model_len"] == 512
        assert client.get("/version").json()["version"]
        document = json.loads(client.get("/openapi.json").text)
    assert "/v1/chat/completions" in document["paths"]
