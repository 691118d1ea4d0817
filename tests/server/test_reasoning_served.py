"""Thoughts through the official client."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.conftest import MODEL, Running, serving

OPENED = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}><think>\n"


@pytest.fixture(scope="module")
def opened(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server whose template opens the thought."""
    template = tmp_path_factory.mktemp("template") / "chat.jinja"
    template.write_text(OPENED)
    with serving(model, "--chat-template", str(template)) as running:
        yield running


@pytest.fixture(scope="module")
def asked_for(model: Path) -> Iterator[Running]:
    """A server whose template knows nothing of thoughts."""
    with serving(model, "--reasoning-parser", "qwen3") as running:
        yield running


def ask(server: Running, **asked: Any) -> Any:
    return server.openai.chat.completions.create(
        **{"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 60, **asked}
    )


def test_a_form_holds_for_the_answer_and_leaves_room_for_a_thought(asked_for: Running) -> None:
    form = {"structured_outputs": {"choice": ["cc", "dd"]}}
    # The tokenizer lacks bytes: beyond ASCII, a letter may begin of which no token has the rest.
    ascii_only = {str(token): -100 for token in range(99, 203)}
    for seed in range(3):
        reply = ask(asked_for, seed=seed, extra_body=form, logit_bias=ascii_only)
        message = reply.choices[0].message
        thought = getattr(message, "reasoning_content", None)
        assert message.content in ("cc", "dd") or thought


@pytest.mark.parametrize("include", [True, False], ids=["told", "kept back"])
def test_a_template_that_opens_a_thought(opened: Running, include: bool) -> None:
    asked: Any = {"temperature": 1, "seed": 1, "extra_body": {"include_reasoning": include}}
    reply = ask(opened, **asked)
    message = reply.choices[0].message
    assert message.content == ""  # noise never ends its thought
    thought = getattr(message, "reasoning_content", None)
    assert bool(thought) == include
    assert reply.usage.completion_tokens_details.reasoning_tokens == reply.usage.completion_tokens
    deltas = [c.choices[0].delta for c in ask(opened, **asked, stream=True)]
    streamed = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
    assert streamed == (thought or "")
    assert "".join(delta.content or "" for delta in deltas) == ""


def test_a_thought_in_the_newer_apis(opened: Running) -> None:
    reply = opened.openai.responses.create(model=MODEL, input="hi", max_output_tokens=20, temperature=0)
    (item,) = reply.output
    assert item.type == "reasoning"
    assert reply.usage.output_tokens_details.reasoning_tokens == reply.usage.output_tokens
    events = opened.openai.responses.create(
        model=MODEL, input="hi", max_output_tokens=20, temperature=0, stream=True
    )
    deltas = [e.delta for e in events if e.type == "response.reasoning_text.delta"]
    assert "".join(deltas) == item.content[0].text
