"""What agents send: tools, calls and results, to models whose templates know them and to others."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import pytest

from tests.server.conftest import MODEL, Running, serving

pytestmark = pytest.mark.timeout(60)

PLAIN = "{% for m in messages %}{{ '[' + m['role'] + ']' + m['content'] }}{% endfor %}"  # as SmolLM2's
TAUGHT = (
    "{{ reasoning_effort or '' }}"
    "{% if tools %}{% for t in tools %}{{ t.function.name }};{% endfor %}{% endif %}"
    "{% for m in messages %}[{{ m.role }}]"
    "{% if 'tool_calls' in m and m.tool_calls | length == 0 %}no calls{% endif %}"  # as Llama's
    "{% if m.content is none %}null{% for c in m.tool_calls %} {{ c.function.name }}"
    "{{ c.function.arguments | tojson }}{% endfor %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["n"],
    "additionalProperties": False,
}
TOOL: Any = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}
CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"n": 1}'}}
USER: dict[str, Any] = {"role": "user", "content": "hi"}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "seen"}


def by_template(model: Path, where: Path, source: str) -> Iterator[Running]:
    path = where / "template.jinja"
    path.write_text(source)
    with serving(model, "--chat-template", str(path)) as running:
        yield running


@pytest.fixture(scope="module")
def plain(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    yield from by_template(model, tmp_path_factory.mktemp("plain"), PLAIN)


@pytest.fixture(scope="module")
def taught(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    yield from by_template(model, tmp_path_factory.mktemp("taught"), TAUGHT)


def written(server: Running, messages: list[Any], **asked: Any) -> str:
    with server.http as client:
        ids = client.post("/tokenize", json={"messages": messages, **asked}).json()["tokens"]
        return str(client.post("/detokenize", json={"tokens": ids}).json()["prompt"])


@pytest.mark.parametrize(
    "turn",
    [{"content": None}, {}, {"content": ""}],
    ids=["null", "left out", "empty"],
)
def test_a_turn_that_only_calls_is_read(plain: Running, turn: dict[str, Any]) -> None:
    messages = [USER, {"role": "assistant", "tool_calls": [CALL], **turn}, RESULT]
    assert written(plain, messages) == "[user]hi[assistant][tool]seen"


def test_a_template_that_asks_for_null_sees_null(taught: Running) -> None:
    messages = [USER, {"role": "assistant", "tool_calls": [CALL]}, RESULT]
    assert written(taught, messages) == '[user]hi[assistant]null look{"n": 1}[tool]seen'
    assert written(taught, [USER, {"role": "assistant", "content": None}]) == "[user]hi[assistant]"


@pytest.mark.parametrize("calls", [None, []], ids=["null", "none"])
def test_what_a_turn_does_not_have_is_not_there(taught: Running, calls: Any) -> None:
    nothing = {"tool_calls": calls, "function_call": None, "refusal": None}
    messages = [USER, {"role": "assistant", "content": "ho", **nothing}]
    assert written(taught, messages) == "[user]hi[assistant]ho"


@pytest.mark.parametrize("name", ["plain", "taught"])
def test_the_loop_of_openais_client(name: str, request: pytest.FixtureRequest) -> None:
    server: Running = request.getfixturevalue(name)
    messages: list[Any] = [USER]
    for _ in range(2):
        forced: Any = {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
        reply = server.openai.chat.completions.create(model=MODEL, messages=messages, **forced)
        message = reply.choices[0].message
        assert message.content is None
        (call,) = message.tool_calls
        messages += [message, {"role": "tool", "tool_call_id": call.id, "content": "seen"}]
    assert len(messages) == 5


@pytest.mark.parametrize("name", ["plain", "taught"])
def test_the_other_routes_write_the_same(name: str, request: pytest.FixtureRequest) -> None:
    server: Running = request.getfixturevalue(name)
    messages: list[Any] = [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}, RESULT]
    with server.http as client:
        expected = client.post("/tokenize", json={"messages": messages}).json()["count"]
    items: Any = [
        USER,
        {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"n": 1}'},
        {"type": "function_call_output", "call_id": "c1", "output": "seen"},
    ]
    usage = server.openai.responses.create(model=MODEL, input=items, max_output_tokens=2).usage
    assert usage.input_tokens == expected
    blocks: Any = [
        USER,
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "c1", "name": "look", "input": {"n": 1}}],
        },
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "seen"}],
        },
    ]
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        counted = client.messages.count_tokens(model=MODEL, messages=blocks)
    assert counted.input_tokens == expected


def note(server: Running, path: str = "/v1/chat/completions", **asked: Any) -> str:
    body = {"messages": [USER], "max_tokens": 4, **asked}
    with server.http as client:
        reply = client.post(path, json=body)
    assert reply.status_code == 200, reply.text
    return str(reply.headers.get("x-kvspan-note", ""))


CALLED = [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}, RESULT]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_tools_that_the_model_is_not_told_of_are_noted(plain: Running, stream: bool) -> None:
    told_of_none = "The model is told of no tools: its chat template has no place for them"
    assert note(plain, tools=[TOOL], stream=stream) == f"{told_of_none}."
    forced = note(plain, tools=[TOOL], tool_choice="required", stream=stream)
    assert forced == f"{told_of_none}; it must call one all the same."
    assert "does not see calls of earlier turns" in note(plain, messages=CALLED, stream=stream)
    assert note(plain, stream=stream) == ""


def test_a_template_with_a_place_for_them_needs_no_note(taught: Running) -> None:
    assert note(taught, tools=[TOOL], messages=CALLED) == ""


def test_a_note_says_all_there_is_to_say(plain: Running) -> None:
    said = note(plain, tools=[TOOL], messages=CALLED, max_tokens=9999)
    assert said.startswith("max_tokens 9999 was cut to ")
    assert "no tools" in said
    assert "earlier turns" in said


def test_the_other_routes_note_it_too(plain: Running) -> None:
    tool = {"name": "look", "input_schema": SCHEMA}
    assert "no tools" in note(plain, "/v1/messages", tools=[tool])
    body = {"input": "hi", "tools": [{"type": "function", "name": "look", "parameters": SCHEMA}]}
    with plain.http as client:
        reply = client.post("/v1/responses", json={**body, "max_output_tokens": 4})
    assert "no tools" in reply.headers["x-kvspan-note"]


def test_start_up_says_whether_the_model_is_told_of_tools(plain: Running, taught: Running) -> None:
    blind = "the chat template tells the model of no tools"
    for server, says in ((plain, True), (taught, False)):
        server.await_said("calls hermes")
        assert any(blind in line for line in server.said) == says


def test_the_effort_of_reasoning_is_the_templates(taught: Running) -> None:
    effort: dict[str, Any] = {"reasoning_effort": "high"}
    assert written(taught, [USER], **effort) == "high[user]hi"
    wins = {"chat_template_kwargs": {"reasoning_effort": "low"}}
    assert written(taught, [USER], **effort, **wins) == "low[user]hi"
    asked: Any = {"messages": [USER], "max_tokens": 2, **effort}
    chat = taught.openai.chat.completions.create(model=MODEL, **asked)
    assert chat.usage.prompt_tokens == len("high[user]hi")
    reply = taught.openai.responses.create(
        model=MODEL, input="hi", max_output_tokens=2, reasoning={"effort": "high"}
    )
    assert reply.usage.input_tokens == len("high[user]hi")
    assert note(taught, **effort) == ""


def test_an_effort_that_the_template_does_not_read_is_noted(plain: Running) -> None:
    said = "reasoning_effort changes nothing: the model's chat template does not look at it."
    assert note(plain, reasoning_effort="high") == said
    body = {"input": "hi", "reasoning": {"effort": "low"}, "max_output_tokens": 2}
    with plain.http as client:
        assert client.post("/v1/responses", json=body).headers["x-kvspan-note"] == said
