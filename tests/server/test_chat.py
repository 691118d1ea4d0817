"""Conversations through the official client, sync and async."""

import asyncio
from typing import Any

import openai
import pytest

from tests.server.conftest import MODEL, Running

MESSAGES: list[Any] = [{"role": "user", "content": "hi"}]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 8, "extra_body": {"ignore_eos": True}}


def chat(server: Running, messages: Any = MESSAGES, **asked: Any) -> Any:
    return server.openai.chat.completions.create(model=MODEL, messages=messages, **{**GREEDY, **asked})


def test_a_stream_adds_up_to_the_whole(server: Running) -> None:
    whole = chat(server)
    chunks = list(chat(server, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(c.choices[0].delta.content or "" for c in chunks)
    assert text == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason == "length"
    assert [c.choices[0].finish_reason for c in chunks[:-1]] == [None] * (len(chunks) - 1)


def test_several_answers(server: Running) -> None:
    whole = chat(server, n=3, temperature=1.2, seed=1)
    texts = ["", "", ""]
    for chunk in chat(server, n=3, temperature=1.2, seed=1, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [c.message.content for c in whole.choices]


def test_the_template_writes_the_prompt(server: Running) -> None:
    with server.http as client:
        found = client.post("/tokenize", json={"messages": MESSAGES}).json()
        text = client.post("/detokenize", json={"tokens": found["tokens"]}).json()["prompt"]
    assert text == "[user]hi>"
    parts = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    assert chat(server, parts).choices[0].message == chat(server).choices[0].message


def test_logprobs(server: Running) -> None:
    whole = chat(server, logprobs=True, top_logprobs=3)
    entries = whole.choices[0].logprobs.content
    assert len(entries) == 8
    assert all(len(e.top_logprobs) == 3 for e in entries)
    assert all(e.logprob == e.top_logprobs[0].logprob for e in entries)  # greedy
    streamed = [
        e
        for c in chat(server, logprobs=True, top_logprobs=3, stream=True)
        if c.choices[0].logprobs is not None
        for e in c.choices[0].logprobs.content
    ]
    assert streamed == entries
    raw = bytes(b for e in entries for b in e.bytes)
    assert raw.decode(errors="replace") == whole.choices[0].message.content


def test_max_completion_tokens_wins(server: Running) -> None:
    assert chat(server, max_completion_tokens=3).usage.completion_tokens == 3


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [{"content": "hi"}],
        [{"role": "user"}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        [{"role": "user", "content": 3}],
        [{"role": "user", "content": "\ud800"}],
    ],
)
def test_a_bad_message_is_refused(server: Running, messages: Any) -> None:
    with pytest.raises((openai.BadRequestError, UnicodeEncodeError)):
        chat(server, messages)


async def _together(server: Running) -> list[str]:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="x") as client:
        calls = [
            client.chat.completions.create(model=MODEL, messages=MESSAGES, **GREEDY) for _ in range(16)
        ]
        return [reply.choices[0].message.content or "" for reply in await asyncio.gather(*calls)]


def test_many_at_once_say_the_same(server: Running) -> None:
    assert set(asyncio.run(_together(server))) == {chat(server).choices[0].message.content}
