"""Chat templates: the server's own, and those that requests bring, which are programs of strangers."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.conftest import Running, serving

pytestmark = pytest.mark.timeout(60)
OURS = "<{{ messages[0].content }}>"
BROUGHT: dict[str, Any] = {
    "messages": [{"role": "user", "content": "hi"}],
    "chat_template": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
def test_a_template_that_a_request_brings_is_not_run(server: Running, path: str) -> None:
    with server.http as client:
        client.timeout = 10.0  # it would run for minutes, and every stream would stand still
        reply = client.post(path, json=BROUGHT)
    assert reply.status_code == 400
    assert "--trust-request-chat-template" in reply.json()["error"]["message"]


def test_templates_of_requests_and_of_the_server(model: Path, tmp_path: Path) -> None:
    (tmp_path / "ours.jinja").write_text(OURS)
    options = ("--trust-request-chat-template", "--chat-template", str(tmp_path / "ours.jinja"))
    with serving(model, *options) as server, server.http as client:

        def written(**asked: Any) -> str:
            body = {"messages": BROUGHT["messages"], **asked}
            ids = client.post("/tokenize", json=body).json()["tokens"]
            return str(client.post("/detokenize", json={"tokens": ids}).json()["prompt"])

        assert written() == "<hi>"
        assert written(chat_template="{{ messages[0].content }}") == "hi"
        broken = client.post("/tokenize", json={**BROUGHT, "chat_template": "{% if %}"})
    assert broken.status_code == 400
    assert broken.json()["error"]["message"].startswith("chat_template: the chat template is no valid")


def test_a_slow_template_keeps_nobody_else_waiting(model: Path, tmp_path: Path) -> None:
    (tmp_path / "slow.jinja").write_text(
        f"{{% if messages[0].content == 'hi' %}}{BROUGHT['chat_template']}{{% endif %}}{OURS}"
    )
    with (
        serving(model, "--chat-template", str(tmp_path / "slow.jinja")) as server,
        server.http as client,
        server.http as other,
    ):
        client.timeout = 1.0  # it would run for minutes
        with pytest.raises(httpx.ReadTimeout):
            client.post("/tokenize", json={"messages": BROUGHT["messages"]})
        quick = {"messages": [{"role": "user", "content": "ho"}], "max_tokens": 3}
        assert other.post("/v1/chat/completions", json=quick).status_code == 200


def test_a_broken_template_keeps_the_server_from_starting(model: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.jinja"
    broken.write_text("{% if %}")
    command = [sys.executable, "-m", "kvspan", "serve", str(model), "--port", "0"]
    options = ["--kv-cache-memory", "8MiB", "--max-model-len", "512", "--chat-template", str(broken)]
    ended = subprocess.run([*command, *options], capture_output=True, text=True, timeout=50)
    assert ended.returncode == 2, ended.stderr
    assert f"kvspan: --chat-template {broken}: the chat template is no valid Jinja" in ended.stderr
