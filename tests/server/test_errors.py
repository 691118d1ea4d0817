"""A refusal blames the field that the client sent, by its own name, in OpenAI's shape."""

from typing import Any

import pytest

from tests.server.conftest import LIMIT, Running

pytestmark = pytest.mark.timeout(60)
ASK = {"role": "user", "content": "hello"}
CHAT = {"messages": [ASK], "max_tokens": 2}
TOOL = {"type": "function", "function": {"name": "f"}}


def refused(server: Running, path: str, body: Any) -> dict[str, Any]:
    with server.http as client:
        reply = client.post(f"/v1/{path}", json=body)
    assert reply.status_code == 400, reply.text
    error: dict[str, Any] = reply.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["message"].count("?.") == 0
    return error


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"n": "two"}, "n"),
        ({"n": 100_000}, "n"),
        ({"stop": 5}, "stop"),
        ({"stop": [5]}, "stop"),
        ({"min_tokens": 9, "max_tokens": 4}, "min_tokens"),
        ({"logit_bias": {"900": 1}}, "logit_bias"),
        ({"logprobs": 1000}, "logprobs"),
        ({"prompt": "x" * (LIMIT + 1)}, "prompt"),
        ({"prompt": [500]}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[1], []]}, "prompt"),
        ({"best_of": 2}, "best_of"),
        ({"temprature": 2}, "temprature"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"usage": True}}, "usage"),
        ({"guided_regex": "("}, "guided_regex"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs"),
        ({"response_format": {"type": "x"}}, "response_format"),
        ({"response_format": {"type": "regex", "regex": "("}}, "response_format"),
    ],
    ids=str,
)
def test_a_completions_field(server: Running, asked: dict[str, Any], param: str) -> None:
    assert refused(server, "completions", {"prompt": "x", **asked})["param"] == param


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": ["x"]}, "messages[0]"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [ASK, {"role": "user"}]}, "messages[1].content"),
        (
            {"messages": [ASK, {"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[1].content",
        ),
        ({"messages": [{"role": "user", "content": "x" * (LIMIT + 1)}]}, "messages"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"logprobs": True, "top_logprobs": 1000}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -5}, "top_logprobs"),
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "regex", "regex": "("}}, "response_format"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [TOOL, {"type": "web_search"}]}, "tools[1].type"),
        ({"tools": [TOOL, TOOL]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
            "tool_choice",
        ),
        ({"chat_template": "{{ messages }}"}, "chat_template"),
    ],
    ids=str,
)
def test_a_field_of_a_conversation(server: Running, asked: dict[str, Any], param: str) -> None:
    assert refused(server, "chat/completions", CHAT | asked)["param"] == param


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"input": 3}, "input"),
        ({"input": []}, "input"),
        ({"input": "x" * (LIMIT + 1)}, "input"),
        ({"input": [{"role": "foo", "content": "x"}]}, "input[0].role"),
        ({"input": [{"type": "image"}]}, "input[0].type"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"text": {"format": {"type": "x"}}}, "text.format"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"previous_response_id": "x"}, "previous_response_id"),
        ({"reasoning": {"effort": 5}}, "reasoning.effort"),
    ],
    ids=str,
)
def test_a_field_of_a_response(server: Running, asked: dict[str, Any], param: str) -> None:
    assert refused(server, "responses", {"input": "x", **asked})["param"] == param


def test_a_model_that_is_not_there(server: Running) -> None:
    with server.http as client:
        for path, body in (("completions", {"prompt": "x"}), ("chat/completions", CHAT)):
            error = client.post(f"/v1/{path}", json={**body, "model": "other"}).json()["error"]
            assert (error["param"], error["code"]) == ("model", "model_not_found")


def test_a_prompt_over_the_limit_has_openais_code(server: Running) -> None:
    for path, body in (
        ("completions", {"prompt": "x" * 600}),
        ("chat/completions", {"messages": [{"role": "user", "content": "x" * 600}]}),
        ("responses", {"input": "x" * 600}),
    ):
        error = refused(server, path, body)
        assert error["code"] == "context_length_exceeded"
        assert f"--max-model-len is {LIMIT}" in error["message"]


@pytest.mark.parametrize(
    ("path", "body", "where"),
    [
        ("chat/completions", {"messages": [ASK, {"role": "robot", "content": "x"}]}, "messages[1]"),
        ("responses", {"input": [{"role": "robot", "content": "x"}]}, "input[0]"),
    ],
    ids=["chat", "responses"],
)
def test_a_role_that_nobody_has(server: Running, path: str, body: dict[str, Any], where: str) -> None:
    message = refused(server, path, body)["message"]
    assert message.startswith(f"{where}.role must be one of ")
    assert "user, assistant" in message
    assert message.endswith("got 'robot'.")


@pytest.mark.parametrize(
    ("message", "says"),
    [
        ({"role": 7, "content": "x"}, ("messages[0].role must be text, one of system, ", "got 7.")),
        ({"content": "x"}, ("messages[0] has no role: it is one of system, ", "tool.")),
    ],
    ids=["a number", "none"],
)
def test_a_role_that_is_no_word(server: Running, message: dict[str, Any], says: tuple[str, str]) -> None:
    told = refused(server, "chat/completions", {"messages": [message]})["message"]
    assert told.startswith(says[0])
    assert told.endswith(says[1])


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "The body is empty: send a JSON object with the header Content-Type: application/json."),
        (b"[]", "The body must be a JSON object, got a list."),
        (b'"x"', "The body must be a JSON object, got a text."),
        (b"{}", "prompt is missing."),
        (b'{"prompt": ["a", [1]]}', "prompt must be a text, a list of texts, a list of token ids or"),
        (b'{"prompt": [1, "a"]}', "all of one kind."),
        (b'{"prompt": null}', "prompt must be a text, a list of texts,"),
        (b'{"prompt": "x", "n": "two"}', "n must be a valid integer, got a text."),
        (b'{"prompt": "x", "n": 1.5}', "n must be a valid integer, got 1.5."),
        (
            b'{"prompt": "x", "stream": true, "stream_options": {"usage": 1}}',
            "there is no field usage: ",
        ),
    ],
    ids=str,
)
def test_what_is_said_of_a_body(server: Running, content: bytes, says: str) -> None:
    with server.http as client:
        header = {"Content-Type": "application/json"}
        reply = client.post("/v1/completions", content=content, headers=header)
    assert reply.status_code == 400
    assert says in reply.json()["error"]["message"]


def test_a_method_that_is_not_there_is_told_which_is(server: Running) -> None:
    with server.http as client:
        reply = client.get("/v1/chat/completions")
    assert reply.status_code == 405
    assert reply.headers["allow"] == "POST"
    assert reply.json()["error"]["message"] == "/v1/chat/completions takes no GET: send POST."


def test_a_path_that_is_not_there_is_named(server: Running) -> None:
    with server.http as client:
        reply = client.post("/v1/embeddings", json={"input": "x"})
    assert reply.status_code == 404
    assert "There is no /v1/embeddings here" in reply.json()["error"]["message"]


@pytest.mark.parametrize(
    ("name", "value", "instead"),
    [
        ("regex", "[0-9]+", 'structured_outputs: {"regex": ...}'),
        ("ebnf", 'root ::= "x"', 'structured_outputs: {"grammar": ...}'),
        ("json_schema", '{"type": "object"}', 'structured_outputs: {"json": ...}'),
        ("separate_reasoning", False, "include_reasoning"),
    ],
)
@pytest.mark.parametrize(
    ("path", "body"), [("completions", {"prompt": "x"}), ("chat/completions", CHAT)]
)
def test_fields_of_sglang_are_told_what_to_use_here(
    server: Running, path: str, body: dict[str, Any], name: str, value: Any, instead: str
) -> None:
    error = refused(server, path, {**body, name: value})
    assert error["param"] == name
    assert f"{name} is not supported: " in error["message"]
    assert instead in error["message"]


@pytest.mark.parametrize("name", ["request_id", "rid"])
def test_an_id_that_a_request_brings_changes_nothing(server: Running, name: str) -> None:
    with server.http as client:
        reply = client.post("/v1/chat/completions", json={**CHAT, name: "mine"})
    assert reply.status_code == 200
    assert reply.json()["id"].startswith("chatcmpl-")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        ("completions", {"prompt": "x"}, "max_tokens"),
        ("chat/completions", {"messages": [ASK]}, "max_tokens"),
        ("chat/completions", {"messages": [ASK]}, "max_completion_tokens"),
        ("responses", {"input": "x"}, "max_output_tokens"),
        ("messages", {"messages": [ASK]}, "max_tokens"),
    ],
)
def test_a_cut_of_what_was_asked_is_told(
    server: Running, path: str, body: dict[str, Any], name: str, stream: bool
) -> None:
    with server.http as client:
        for asked, is_cut in ((4000, True), (2, False)):
            reply = client.post(f"/v1/{path}", json={**body, name: asked, "stream": stream})
            assert reply.status_code == 200
            note = reply.headers.get("x-kvspan-note", "")
            assert note.startswith(f"{name} {asked} was cut to ") == is_cut
            assert (f"--max-model-len is {LIMIT}" in note) == is_cut
