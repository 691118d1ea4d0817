"""Whatever is sent, the answer is a sentence in OpenAI's shape, or a closed connection."""

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.conftest import Running, serving

pytestmark = pytest.mark.timeout(60)
JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def guarded(model: Path) -> Iterator[Running]:
    options = ("--api-key", "one,two", "--header-timeout", "0.5", "--body-timeout", "1")
    with serving(
        model, *options, "--max-body-size", "100KB", "--allowed-origins", "https://a.example"
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
        other = client.get("/health", headers={"Origin": "https://b.example"})
        assert "access-control-allow-origin" not in other.headers


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"POST /v1/comp",
        b"GET /health HTTP/1.1\r\nHost: x\r\nX-Slow: ",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nx-api-key: one\r\nContent-Length: 10\r\n\r\n{",
    ],
    ids=["nothing", "half a line", "half a head", "half a body"],
)
def test_a_slow_client_is_cut_off(guarded: Running, sent: bytes) -> None:
    with connect(guarded) as sock:
        sock.sendall(sent)
        while sock.recv(4096):  # until the server closes
            pass


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
