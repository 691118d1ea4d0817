"""`/v1/responses` and `/v1/messages` through the clients that their makers ship."""

import json
from typing import Any

import anthropic
import openai
import pytest

from tests.server.conftest import MODEL, Running

SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["n"],
    "additionalProperties": False,
}
OPENAI_TOOL: Any = {"type": "function", "name": "look", "parameters": SCHEMA, "strict": True}
GREEDY = {"temperature": 0}  # which the client no longer has a name for
ANTHROPIC_TOOL: Any = {"name": "look", "description": "Looks.", "input_schema": SCHEMA}


def respond(server: Running, **asked: Any) -> Any:
    return server.openai.responses.create(
        **{"model": MODEL, "input": "hi", "temperature": 0, "max_output_tokens": 12, **asked}
    )


def client(server: Running) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)


def ask(server: Running, **asked: Any) -> Any:
    messages = [{"role": "user", "content": "hi"}]
    defaults = {"model": MODEL, "messages": messages, "max_tokens": 12, "extra_body": GREEDY}
    with client(server) as here:
        return here.messages.create(**{**defaults, **asked})


def plain(server: Running, messages: Any, **asked: Any) -> str:
    """What the chat route says to the same."""
    reply = server.openai.chat.completions.create(
        **{"model": MODEL, "messages": messages, "temperature": 0, "max_tokens": 12, **asked}
    )
    return reply.choices[0].message.content


def test_a_response_says_what_the_chat_says(server: Running) -> None:
    reply = respond(server, instructions="be brief")
    said = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    assert reply.output_text == plain(server, said)
    assert reply.status in ("completed", "incomplete")
    assert (reply.status == "incomplete") == (reply.usage.output_tokens == 12)
    assert reply.usage.total_tokens == reply.usage.input_tokens + reply.usage.output_tokens
    assert reply.usage.input_tokens_details.cached_tokens >= 0


def test_a_streamed_response_adds_up(server: Running) -> None:
    whole = respond(server)
    events = list(respond(server, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [e.type for e in events[:4]] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    assert text == whole.output_text == events[-1].response.output_text
    assert events[-1].type == f"response.{whole.status}"
    with server.openai.responses.stream(
        model=MODEL, input="hi", temperature=0, max_output_tokens=12
    ) as live:
        kinds = [event.type for event in live]
    assert "response.output_text.done" in kinds


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_response_calls_a_function(server: Running, stream: bool) -> None:
    asked = {"tools": [OPENAI_TOOL], "tool_choice": "required", "parallel_tool_calls": False}
    reply = respond(server, **asked, max_output_tokens=200, stream=stream)
    if stream:
        events = list(reply)
        deltas = [e.delta for e in events if e.type == "response.function_call_arguments.delta"]
        (done,) = [e for e in events if e.type == "response.function_call_arguments.done"]
        assert "".join(deltas) == done.arguments
        reply = events[-1].response
    (call,) = reply.output
    assert (call.type, call.name) == ("function_call", "look")
    assert set(json.loads(call.arguments)) == {"n"}
    assert reply.status == "completed"
    again = [
        {"role": "user", "content": "hi"},
        call.model_dump(),
        {"type": "function_call_output", "call_id": call.call_id, "output": "seen"},
    ]
    assert respond(server, input=again, tools=[OPENAI_TOOL]).usage.output_tokens > 0


def test_a_response_whose_call_is_cut_says_so(server: Running) -> None:
    asked = {"tools": [OPENAI_TOOL], "tool_choice": "required", "max_output_tokens": 46}
    events = list(respond(server, **asked, stream=True))
    deltas = [e.delta for e in events if e.type == "response.function_call_arguments.delta"]
    (item,) = events[-1].response.output
    assert (item.type, item.arguments) == ("function_call", "".join(deltas))
    done = next(e.item for e in events if e.type == "response.output_item.done")
    assert item.status == done.status == events[-1].response.status == "incomplete"


def test_a_response_has_the_form_that_was_asked_for(server: Running) -> None:
    form = {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}
    reply = respond(server, text=form, max_output_tokens=200)
    assert set(json.loads(reply.output_text)) == {"n"}


def test_a_response_keeps_the_turns_of_its_input(server: Running) -> None:
    turns: Any = [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "b"}]},
        {"type": "message", "role": "user", "content": "c"},
    ]
    said = [{"role": r, "content": c} for r, c in (("user", "a"), ("assistant", "b"), ("user", "c"))]
    assert respond(server, input=turns).output_text == plain(server, said)


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"previous_response_id": "resp_1"}, "nothing is stored"),
        ({"background": True}, "nothing is stored"),
        ({"tools": [{"type": "web_search"}]}, "web_search"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "item_reference"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "text only",
        ),
        ({"input": []}, "input is empty"),
        ({"text": {"format": {"type": "xml"}}}, "xml"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_a_response_that_cannot_be_is_refused(server: Running, asked: Any, reason: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        respond(server, **asked)
    assert reason in caught.value.message


def test_a_message_says_what_the_chat_says(server: Running) -> None:
    reply = ask(server, system="be brief")
    said = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    assert reply.content[0].text == plain(server, said)
    assert reply.stop_reason in ("end_turn", "max_tokens")
    assert reply.usage.output_tokens <= 12
    again = ask(server, system="be brief " * 9)
    hit = ask(server, system="be brief " * 9)
    assert hit.usage.cache_read_input_tokens > 0
    total = again.usage.input_tokens + again.usage.cache_read_input_tokens
    assert hit.usage.input_tokens + hit.usage.cache_read_input_tokens == total


def test_a_streamed_message_adds_up(server: Running) -> None:
    whole = ask(server)
    messages: Any = [{"role": "user", "content": "hi"}]
    asked: dict[str, Any] = {"model": MODEL, "max_tokens": 12, "extra_body": GREEDY}
    with client(server) as here:
        events = here.messages.create(messages=messages, **asked, stream=True)
        kinds = [event.type for event in events]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    with client(server) as here, here.messages.stream(messages=messages, **asked) as stream:
        assert "".join(stream.text_stream) == whole.content[0].text
        final = stream.get_final_message()
    assert (final.stop_reason, final.usage) == (whole.stop_reason, whole.usage)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_message_uses_a_tool(server: Running, stream: bool) -> None:
    messages: Any = [{"role": "user", "content": "hi"}]
    choice = {"type": "tool", "name": "look"}
    asked: Any = {"model": MODEL, "max_tokens": 200, "tools": [ANTHROPIC_TOOL], "tool_choice": choice}
    if stream:
        with client(server) as here, here.messages.stream(messages=messages, **asked) as live:
            reply = live.get_final_message()
    else:
        reply = ask(server, messages=messages, **asked)
    (used,) = reply.content
    assert (reply.stop_reason, used.type, used.name) == ("tool_use", "tool_use", "look")
    assert set(used.input) == {"n"}
    result = {"type": "tool_result", "tool_use_id": used.id, "content": "seen"}
    messages += [
        {"role": "assistant", "content": [block.model_dump() for block in reply.content]},
        {"role": "user", "content": [result, {"type": "text", "text": "and?"}]},
    ]
    assert ask(server, messages=messages, tools=[ANTHROPIC_TOOL]).usage.output_tokens > 0


def test_a_stop_sequence_is_told(server: Running) -> None:
    text = ask(server).content[0].text
    stop = next(text[i : i + 2] for i in range(1, len(text) - 2) if text.index(text[i : i + 2]) == i)
    reply = ask(server, stop_sequences=[stop])
    assert (reply.stop_reason, reply.stop_sequence) == ("stop_sequence", stop)
    assert reply.content[0].text == text[: text.index(stop)]


def test_tokens_are_counted_without_an_answer(server: Running) -> None:
    messages: Any = [{"role": "user", "content": "hi"}]
    with client(server) as here:
        counted = here.messages.count_tokens(model=MODEL, messages=messages).input_tokens
    usage = ask(server).usage
    assert counted == usage.input_tokens + usage.cache_read_input_tokens


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "text only"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "robot"),
        ({"tool_choice": {"type": "some"}}, "some"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "bash_20250124"),
        ({"max_tokens": 0}, "max_tokens"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_a_message_that_cannot_be_is_refused(server: Running, asked: Any, reason: str) -> None:
    with pytest.raises(anthropic.BadRequestError) as caught:
        ask(server, **asked)
    assert caught.value.body["type"] == "error"
    assert reason in caught.value.body["error"]["message"]


def test_another_model_is_not_found(server: Running) -> None:
    with pytest.raises(anthropic.NotFoundError) as caught:
        ask(server, model="claude")
    assert caught.value.body["error"]["type"] == "not_found_error"
