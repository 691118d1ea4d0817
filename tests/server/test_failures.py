"""A request that cannot be finished ends with a sentence; those beside it notice nothing."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from kvspan.testing.checkpoints import spoil_token, write_checkpoint, write_tokenizer
from kvspan.testing.forms import EXPLOSIVE
from kvspan.testing.tiny import TINY
from tests.server.conftest import Running, serving

pytestmark = pytest.mark.timeout(60)
SPOILT = 50
GOOD, BAD = [10, 11, 12], [10, 11, SPOILT]


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    directory = tmp_path_factory.mktemp("broken")
    write_checkpoint(directory, TINY["llama-gqa"], seed=5)
    write_tokenizer(directory, vocab_size=203)
    spoil_token(directory, SPOILT)
    with serving(directory) as running:
        yield running


def complete(server: Running, prompt: Any, **asked: Any) -> httpx.Response:
    body = {"prompt": prompt, "max_tokens": 6, "temperature": 0, "ignore_eos": True, **asked}
    with server.http as client:
        return client.post("/v1/completions", json=body)


def test_logits_that_are_no_numbers_end_their_request_alone(broken: Running) -> None:
    good = complete(broken, GOOD)
    failed = complete(broken, BAD)
    assert failed.status_code == 500
    assert failed.headers["x-should-retry"] == "false"
    error = failed.json()["error"]
    assert error["code"] == "output_error"
    assert "203 logits 203 are NaN" in error["message"]
    assert "connection" not in failed.headers
    assert complete(broken, GOOD).json()["choices"] == good.json()["choices"]
    assert broken.metric("kvspan_engine_restarts_total") == 0
    assert broken.metric("kvspan_kv_used_tokens") == 0
    assert complete(broken, [GOOD, BAD]).status_code == 500
    assert complete(broken, BAD, n=2, stream=True).status_code == 500
    assert complete(broken, BAD, echo=True, logprobs=1).status_code == 500


def test_a_stream_that_fails_later_ends_with_an_event(broken: Running) -> None:
    """A bias makes the model write the spoilt token, whose successor has no logits."""
    reply = complete(broken, GOOD, stream=True, logit_bias={str(SPOILT): 100})
    assert reply.status_code == 200
    events = [line.removeprefix("data: ") for line in reply.text.splitlines() if line]
    assert "NaN" in json.loads(events[-1])["error"]["message"]
    assert not any("finish_reason" in event and '"error"' in event for event in events[:-1])


def test_a_message_that_fails_says_so_in_anthropics_shape(broken: Running) -> None:
    with broken.http as client:
        spoilt = client.post("/detokenize", json={"tokens": [SPOILT]}).json()["prompt"]
        body = {"messages": [{"role": "user", "content": spoilt}], "max_tokens": 4}
        reply = client.post("/v1/messages", json=body)
    assert reply.status_code == 500
    assert reply.json()["error"]["type"] == "api_error"


@pytest.mark.parametrize("stream", [False, True])
def test_a_form_that_can_be_held_to_no_longer_is_told(server: Running, stream: bool) -> None:
    with server.http as client:
        (x,) = client.post("/tokenize", json={"prompt": "x"}).json()["tokens"]
    form = {"structured_outputs": {"grammar": EXPLOSIVE}, "logit_bias": {str(x): 100}, "max_tokens": 400}
    reply = complete(server, "hello", **form, stream=stream)
    if not stream:
        assert reply.status_code == 500
        assert "can no longer be held to its form" in reply.json()["error"]["message"]
        return
    chunks = [json.loads(line.removeprefix("data: ")) for line in reply.text.splitlines() if line]
    text = "".join(chunk["choices"][0]["text"] for chunk in chunks[:-1])
    assert set(text) == {"x"}
    assert "can no longer be held to its form" in chunks[-1]["error"]["message"]
    assert server.metric("kvspan_kv_used_tokens") == 0
