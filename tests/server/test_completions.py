"""Completions through the official client: fields, streams, log-probabilities, limits."""

import json
import re
from typing import Any

import openai
import pytest

from tests.server.conftest import LIMIT, MODEL, Running

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 8, "extra_body": {"ignore_eos": True}}


def complete(server: Running, prompt: Any = "hello", **asked: Any) -> Any:
    return server.openai.completions.create(model=MODEL, prompt=prompt, **{**GREEDY, **asked})


def test_a_stream_adds_up_to_the_whole(server: Running) -> None:
    whole = complete(server)
    chunks = list(complete(server, stream=True))
    assert "".join(c.choices[0].text for c in chunks) == whole.choices[0].text
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason == "length"
    assert len({c.id for c in chunks}) == 1
    assert whole.usage.completion_tokens == 8
    assert whole.usage.prompt_tokens == 5


def test_prompts_in_every_form(server: Running) -> None:
    with server.http as client:
        ids = client.post("/tokenize", json={"prompt": "hello"}).json()["tokens"]
        assert client.post("/detokenize", json={"tokens": ids}).json() == {"prompt": "hello"}
    texts = [complete(server, p).choices[0].text for p in ("hello", ids, ["hello"], [ids])]
    assert len(set(texts)) == 1
    several = complete(server, ["hello", "other"], n=2)
    assert [c.index for c in several.choices] == [0, 1, 2, 3]
    assert several.choices[0].text == several.choices[1].text == texts[0]
    assert several.choices[2].text != texts[0]
    assert several.usage.completion_tokens == 32
    streamed = ["", "", "", ""]
    for chunk in complete(server, ["hello", "other"], n=2, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
    assert streamed == [c.text for c in several.choices]


def test_echo_with_logprobs_has_the_prompts_entries(server: Running) -> None:
    reply = complete(server, echo=True, logprobs=2)
    logprobs = reply.choices[0].logprobs
    assert reply.choices[0].text.startswith("hello")
    assert logprobs.tokens[:5] == list("hello")
    assert logprobs.text_offset[:6] == [0, 1, 2, 3, 4, 5]
    assert logprobs.token_logprobs[0] is None
    assert logprobs.top_logprobs[0] is None
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.top_logprobs) == 13
    assert all(2 <= len(top) <= 3 for top in logprobs.top_logprobs[1:])


def test_scoring_a_prompt_makes_no_text(server: Running) -> None:
    reply = complete(server, echo=True, logprobs=0, max_tokens=0)
    assert reply.choices[0].text == "hello"
    assert len(reply.choices[0].logprobs.tokens) == 5
    assert reply.usage.completion_tokens == 0
    assert reply.choices[0].finish_reason == "length"


def test_minus_infinity_is_valid_json(server: Running) -> None:
    body = {"prompt": "correct horse battery staple", "echo": True, "logprobs": 1, "top_k": 1}
    with server.http as client:
        reply = client.post("/v1/completions", json={**body, "temperature": 1})
    assert reply.status_code == 200

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    json.loads(reply.text, parse_constant=refuse)


def test_a_stop_string_across_chunks_never_leaks(server: Running) -> None:
    """Tokens are single bytes here, so every stop string of two straddles chunks."""
    text = complete(server, max_tokens=24).choices[0].text
    at = next(i for i in range(6, 20) if text[i : i + 2].isascii() and text.find(text[i : i + 2]) == i)
    stop = text[at : at + 2]
    whole = complete(server, max_tokens=24, stop=[stop, "never"])
    pieces = [c.choices[0] for c in complete(server, max_tokens=24, stop=stop, stream=True)]
    assert whole.choices[0].text == text[:at]
    assert whole.choices[0].finish_reason == "stop"
    assert "".join(p.text for p in pieces) == text[:at]
    assert pieces[-1].finish_reason == "stop"
    assert pieces[-1].model_extra["stop_reason"] == stop


def test_usage_in_streams(server: Running) -> None:
    assert all(c.usage is None for c in complete(server, stream=True))
    assert all(c.usage is None for c in complete(server, stream=True, stream_options={}))
    chunks = list(complete(server, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 8
    assert all(c.usage is None for c in chunks[:-1])
    with server.http as client:
        body = {"prompt": "x", "stream": True, "max_tokens": 2}
        plain = client.post("/v1/completions", json=body).text
        assert '"usage"' not in plain
        asked = client.post("/v1/completions", json=body | {"stream_options": {"include_usage": True}})
        assert '"usage":null' in asked.text
        assert asked.text.endswith("data: [DONE]\n\n")


def test_cached_tokens_are_told(server: Running) -> None:
    prompt = "a prompt that is longer than a block of sixteen tokens"
    complete(server, prompt)
    again = complete(server, prompt)
    assert again.usage.prompt_tokens_details.cached_tokens == 48
    salted = complete(server, prompt, extra_body={"ignore_eos": True, "cache_salt": "mine"})
    assert salted.usage.prompt_tokens_details.cached_tokens == 0
    assert salted.choices[0].text == again.choices[0].text


def test_seeds_repeat_and_outputs_differ(server: Running) -> None:
    asked = {"temperature": 1.5, "n": 3, "max_tokens": 12}
    first, second = complete(server, seed=3, **asked), complete(server, seed=3, **asked)
    assert [c.text for c in first.choices] == [c.text for c in second.choices]
    assert len({c.text for c in first.choices}) == 3
    assert complete(server, seed=4, **asked).choices[0].text != first.choices[0].text


def test_more_tokens_than_room_are_clamped(server: Running) -> None:
    reply = complete(server, "x" * 500, max_tokens=4000)
    assert reply.usage.completion_tokens == LIMIT - 500
    assert reply.choices[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("asked", "status", "says"),
    [
        ({"prompt": "x" * 600}, 400, "600.*512"),
        ({"prompt": ""}, 400, "empty"),
        ({"prompt": [500]}, 400, "500"),
        ({"temperature": -1}, 400, "temperature"),
        ({"logit_bias": {"900": 1}}, 400, "900"),
        ({"model": "other"}, 404, "other"),
        ({"extra_body": {"best_of": 2}}, 400, "best_of"),
        ({"extra_body": {"temprature": 2}}, 400, "temperature"),
        ({"extra_body": {"n": "two"}}, 400, "n must be "),
        ({"prompt": "\ud800"}, 400, "surrogate"),
        ({"stop": ["\ud800"]}, 400, "stop is no Unicode"),
        ({"extra_body": {"cache_salt": "\ud800"}}, 400, "cache_salt is no Unicode"),
        ({"extra_body": {"structured_outputs": {"regex": "\ud800"}}}, 400, "regex is no Unicode"),
        ({"extra_body": {"priority": 2**63}}, 400, "priority"),
        ({"stream_options": {"include_usage": True}}, 400, "stream"),
    ],
)
def test_what_cannot_run_is_refused_in_a_sentence(
    server: Running, asked: dict[str, Any], status: int, says: str
) -> None:
    body = {"prompt": "x", **asked.pop("extra_body", {}), **asked}
    with server.http as client:
        reply = client.post(
            "/v1/completions", content=json.dumps(body), headers={"Content-Type": "application/json"}
        )
    assert reply.status_code == status, reply.text
    error = reply.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert re.search(says, error["message"]), error
    assert "\n" not in error["message"]


def test_errors_are_the_clients_own(server: Running) -> None:
    with pytest.raises(openai.BadRequestError, match="512"):
        complete(server, "x" * 600)
    with pytest.raises(openai.NotFoundError):
        server.openai.completions.create(model="other", prompt="x")


def test_bias_and_penalties(server: Running) -> None:
    ids = complete(
        server, logit_bias={"77": 100}, extra_body={"return_token_ids": True, "ignore_eos": True}
    )
    assert ids.choices[0].model_extra["token_ids"] == [77] * 8
    strict = complete(server, logit_bias={"77": 20}, frequency_penalty=2, max_tokens=20)
    assert (
        strict.choices[0].text != complete(server, logit_bias={"77": 20}, max_tokens=20).choices[0].text
    )
