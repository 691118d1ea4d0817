"""Tools and forms through the official client. The tiny model writes noise, so calls are forced."""

import json
from typing import Any

import openai
import pytest

from kvspan.config.server import SERVER_OPTIONS
from kvspan.server.reasoning.registry import NAMES as REASONING_NAMES
from kvspan.server.tools.registry import NAMES as TOOL_NAMES
from tests.server.conftest import MODEL, Running

MESSAGES: list[Any] = [{"role": "user", "content": "hi"}]
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}, "kind": {"enum": ["a", "bb"]}},
    "required": ["n", "kind"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("look", "find")
]
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}


def chat(server: Running, **asked: Any) -> Any:
    asked = {"max_tokens": 300, "temperature": 1, "seed": 3, **asked}
    return server.openai.chat.completions.create(model=MODEL, messages=MESSAGES, **asked)


def check(arguments: str) -> None:
    value = json.loads(arguments)
    assert set(value) == {"n", "kind"}
    assert 0 <= value["n"] <= 99


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def is_nine(text: str) -> bool:
    return len(text) == 9 and set(text) <= set("ab")


def is_a_side(text: str) -> bool:
    return text in ("left", "right")


def is_bracketed(text: str) -> bool:
    return text[0] + text[-1] == "xz" and set(text[1:-1]) == {"y"}


@pytest.mark.parametrize("choice", ["required", named("find")], ids=["required", "named"])
def test_a_forced_call_fits_its_schema(server: Running, choice: Any) -> None:
    whole = chat(server, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False).choices[0]
    assert whole.finish_reason == "tool_calls"
    assert whole.message.content is None
    (call,) = whole.message.tool_calls
    assert call.id.startswith("call_")
    assert call.function.name in ("look", "find")
    if choice != "required":
        assert call.function.name == "find"
    check(call.function.arguments)


def test_a_streamed_call_adds_up(server: Running) -> None:
    asked: dict[str, Any] = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
    whole = chat(server, **asked).choices[0].message.tool_calls[0]
    parts = [c.choices[0] for c in chat(server, **asked, stream=True)]
    calls = [call for part in parts for call in part.delta.tool_calls or ()]
    assert [call.index for call in calls] == [0] * len(calls)
    assert [call.function.name for call in calls if call.function.name] == [whole.function.name]
    assert "".join(call.function.arguments or "" for call in calls) == whole.function.arguments
    assert len(calls) > 5  # as they are written
    assert parts[-1].finish_reason == "tool_calls"


def test_a_call_that_is_cut_is_content(server: Running) -> None:
    whole = chat(server, tools=TOOLS, tool_choice="required", max_tokens=40).choices[0]
    assert whole.finish_reason == "length"
    assert whole.message.tool_calls is None
    assert whole.message.content.startswith("<tool_call>")


def test_a_streamed_call_that_is_cut_is_told_once(server: Running) -> None:
    asked: dict[str, Any] = {"tools": TOOLS, "tool_choice": "required", "max_tokens": 48}
    whole = chat(server, **asked).choices[0].message.content
    parts = [c.choices[0] for c in chat(server, **asked, stream=True)]
    calls = [call.function for part in parts for call in part.delta.tool_calls or ()]
    told = "".join(function.arguments or "" for function in calls)
    assert told
    assert whole == f'<tool_call>\n{{"name": "{calls[0].name}", "arguments": {told}'
    assert not any(part.delta.content for part in parts)
    assert parts[-1].finish_reason == "length"


def test_a_mark_that_opens_no_call_is_no_content(server: Running) -> None:
    asked: dict[str, Any] = {"tools": TOOLS, "tool_choice": "required", "max_tokens": 11}
    assert chat(server, **asked).choices[0].message.content == ""
    assert not any(c.choices[0].delta.content for c in chat(server, **asked, stream=True))


def test_none_and_auto_leave_the_model_free(server: Running) -> None:
    free = chat(server, max_tokens=12).choices[0].message.content
    for choice in ("none", "auto"):
        assert (
            chat(server, max_tokens=12, tools=TOOLS, tool_choice=choice).choices[0].message.content
            == free
        )


def test_a_conversation_with_calls_and_results_is_read(server: Running) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"n": 1}'}}
    said = [*MESSAGES, {"role": "assistant", "content": None, "tool_calls": [call]}]
    said.append({"role": "tool", "tool_call_id": "c1", "content": "found"})
    reply = server.openai.chat.completions.create(model=MODEL, messages=said, max_tokens=4, tools=TOOLS)
    assert reply.usage.completion_tokens > 0


@pytest.mark.parametrize(
    ("asked", "fits"),
    [
        ({"response_format": FORMAT}, check),
        ({"response_format": {"type": "json_object"}}, lambda text: text.startswith("{")),
        (
            {"extra_body": {"response_format": {"type": "regex", "regex": "[ab]{9}"}}},
            is_nine,
        ),
        (
            {"extra_body": {"structured_outputs": {"choice": ["left", "right"]}}},
            is_a_side,
        ),
        ({"extra_body": {"guided_regex": "[ab]{9}"}}, is_nine),
        ({"extra_body": {"guided_json": SCHEMA}}, check),
        ({"extra_body": {"guided_grammar": 'start: "x" "y"+ "z"'}}, is_bracketed),
    ],
    ids=[
        "json_schema",
        "json_object",
        "regex",
        "choice",
        "guided_regex",
        "guided_json",
        "guided_grammar",
    ],
)
def test_every_way_to_ask_for_a_form(server: Running, asked: dict[str, Any], fits: Any) -> None:
    whole = chat(server, **asked).choices[0]
    if whole.finish_reason == "stop":
        assert fits(whole.message.content) is not False
    streamed = [c.choices[0].delta.content or "" for c in chat(server, **asked, stream=True)]
    assert "".join(streamed) == whole.message.content
    assert whole.finish_reason == "stop" or "json_object" in str(asked)


def test_a_completion_takes_forms_too(server: Running) -> None:
    form = {"structured_outputs": {"regex": "[0-9]{5}"}}
    reply = server.openai.completions.create(
        model=MODEL, prompt="x", max_tokens=50, n=2, extra_body=form
    )
    assert all(choice.text.isdecimal() and len(choice.text) == 5 for choice in reply.choices)
    assert all(choice.finish_reason == "stop" for choice in reply.choices)


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}},
            "type: x",
        ),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "must be a JSON schema"),
        ({"response_format": {"type": "xml"}}, "got 'xml'"),
        ({"response_format": FORMAT, "structured_outputs": {"regex": "a"}}, "give one of them"),
        ({"structured_outputs": {"regex": "("}}, "unclosed group"),
        ({"structured_outputs": {"regex": 5}}, "must be text"),
        ({"tool_choice": "required"}, "needs tools"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "no"}}},
            "look, find",
        ),
        ({"tools": TOOLS, "tool_choice": "always"}, "got 'always'"),
        ({"tools": [{"type": "web_search"}]}, "web_search"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "same name"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": [1]}}]}, "an object"),
        (
            {
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "x"}}}],
                "tool_choice": "required",
            },
            "cannot be used",
        ),
    ],
    ids=lambda value: str(value)[:60],
)
def test_what_cannot_be_is_a_400_that_says_why(server: Running, asked: Any, reason: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        chat(server, extra_body=asked)
    assert reason in caught.value.message


LOOSE = {**SCHEMA, "dependentRequired": {"n": ["kind"]}}


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        (
            "/v1/chat/completions",
            {"response_format": {"type": "json_schema", "json_schema": {"schema": LOOSE}}},
        ),
        ("/v1/chat/completions", {"structured_outputs": {"json": LOOSE}}),
        (
            "/v1/chat/completions",
            {
                "tools": [{"type": "function", "function": {"name": "f", "parameters": LOOSE}}],
                "tool_choice": "required",
            },
        ),
        ("/v1/responses", {"text": {"format": {"type": "json_schema", "name": "x", "schema": LOOSE}}}),
        ("/v1/completions", {"guided_json": LOOSE}),
    ],
    ids=["response_format", "structured_outputs", "tools", "text.format", "a completion"],
)
def test_keywords_that_no_form_has_are_left_out_and_named(
    server: Running, path: str, asked: dict[str, Any]
) -> None:
    said = {
        "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 4},
        "/v1/completions": {"prompt": "x", "max_tokens": 4},
        "/v1/responses": {"input": "x", "max_output_tokens": 4},
    }
    with server.http as client:
        reply = client.post(path, json={**said[path], **asked})
    assert reply.status_code == 200, reply.text
    sentence = "The output is not held to these keywords of its schema: dependentRequired."
    assert sentence in reply.headers["x-kvspan-note"]


def test_a_note_is_one_line_whatever_a_schema_has(server: Running) -> None:
    schema = {"type": "string", "maxLength": 2, "format": "a\r\nX-Evil: é" + "x" * 9000}
    with server.http as client:
        asked = {"guided_json": schema, "messages": MESSAGES, "max_tokens": 4}
        reply = client.post("/v1/chat/completions", json=asked)
    assert "x-evil" not in reply.headers
    assert "format a??X-Evil: ?xxx" in reply.headers["x-kvspan-note"]
    assert len(reply.headers["x-kvspan-note"]) == 2000


def test_options_name_the_styles_that_there_are() -> None:
    kinds = {option.name: option.kind.metavar for option in SERVER_OPTIONS}
    assert all(name in kinds["tool_call_parser"] for name in TOOL_NAMES)
    assert all(name in kinds["reasoning_parser"] for name in REASONING_NAMES)
