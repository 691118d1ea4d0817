import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import models
from transformers import PreTrainedTokenizerFast

from kvspan.errors import ModelError, RequestError
from kvspan.loading.chat_template import ChatTemplate
from kvspan.loading.tokenizer import Tokenizer, load_tokenizer

MESSAGES = [
    {"role": "system", "content": "Be <brief> & kind."},
    {"role": "user", "content": " What's 1 + 1? "},
    {"role": "assistant", "content": "2 \N{WHITE SMILING FACE}"},
]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"b": "<1>", "a": "é"}}}]

TEMPLATES = {
    "plain": "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m['content'] }}"
    "{{ eos_token }}{% endfor %}",
    "blocks": """
    {% for m in messages %}
        {%- if m.role == 'system' %}
    S: {{ m.content | trim }}
        {% else %}
    {{ m.role | upper }}: {{ m.content }}
        {% endif %}
    {% endfor %}
    {% if add_generation_prompt %}
    ASSISTANT:
    {% endif %}
    """,
    "none-or-given": "{{ tools is none }} {{ documents is none }} {{ thinking is defined }}",
    "tojson": "{% for t in tools or [] %}{{ t | tojson }}\n{{ t | tojson(indent=2) }}{% endfor %}",
    "loop-controls": "{% for m in messages %}{% if loop.index == 2 %}{% continue %}{% endif %}"
    "{{ m.content }}{% break %}{% endfor %}",
    "generation": "{% set x = 1 %}{% for m in messages %}{% generation %}{% set x = 2 %}"
    "{{ m.content }}{{ x }}{% endgeneration %}{{ x }}{% endfor %}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
    "{% endfor %}{{ ns.n }}{{ dict(a=1) }}{{ messages[::-1][0].content }}",
    "method": "{{ messages[1].content.strip().split(' ')[0] }}{{ '-' * 3 }}",
}


def template(source: str | dict[str, str], **named: Any) -> ChatTemplate:
    sources = {"default": source} if isinstance(source, str) else source
    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    return ChatTemplate(sources, where="test", special_tokens=tokens, **named)


def render(
    chat: ChatTemplate, messages: Sequence[dict[str, Any]] = (), *, prompt: bool = True, **variables: Any
) -> str:
    return chat.render(messages, add_generation_prompt=prompt, variables=variables)


@pytest.fixture(scope="module")
def theirs() -> Any:
    core = tokenizers.Tokenizer(models.BPE(vocab={"<s>": 0, "</s>": 1}, merges=[]))
    return PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>")


@pytest.mark.parametrize("prompt", [False, True])
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["no-tools", "tools"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_renders_as_transformers(theirs: Any, name: str, tools: Any, prompt: bool) -> None:
    source = TEMPLATES[name]
    expected = theirs.apply_chat_template(
        MESSAGES, tools=tools, chat_template=source, add_generation_prompt=prompt, tokenize=False
    )
    assert render(template(source), MESSAGES, prompt=prompt, tools=tools) == expected


def test_variables_reach_the_template_but_cannot_replace_the_messages() -> None:
    source = "{{ enable_thinking }} {{ messages | length }} {{ add_generation_prompt }}"
    variables = {"enable_thinking": False, "messages": [], "add_generation_prompt": 7}
    text = template(source).render(MESSAGES, add_generation_prompt=True, variables=variables)
    assert text == "False 3 True"


def test_the_date_is_an_argument() -> None:
    chat = template("{{ strftime_now('%d %b %Y') }}", now=lambda: datetime(2024, 7, 26))
    assert render(chat) == "26 Jul 2024"


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        (
            "{{ raise_exception('Roles must alternate.') }}",
            "refuses the messages: Roles must alternate.",
        ),
        ("{{ messages[0].content.upper() }}", "has no element 0"),
        ("{{ 'a' + messages }}", "refuses the messages: can only concatenate str"),
        ("{{ messages.append(1) }}", "refuses the messages: .*append.* unsafe"),
        ("{{ ''.__class__.__mro__ }}", "refuses the messages: .*unsafe"),
        ("{% for i in range(10 ** 9) %}{% endfor %}", "refuses the messages: Range too big"),
        ("{{ 1 // 0 }}", "refuses the messages: .*zero"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "refuses the messages: .*recursion depth"),
        ("{{ 'x' * 10 ** 18 }}", "refuses the messages: MemoryError"),
    ],
    ids=["raised", "undefined", "type", "mutation", "escape", "endless", "zero", "deep", "large"],
)
def test_what_a_template_refuses_is_the_requests_fault(source: str, sentence: str) -> None:
    with pytest.raises(RequestError, match=sentence):
        render(template(source), [])


def test_an_invalid_template_is_the_models_fault() -> None:
    with pytest.raises(ModelError, match="test: the chat template is no valid Jinja"):
        template("{% for m in messages %}")


def test_named_templates_are_chosen_by_tools() -> None:
    chat = template({"default": "D", "tool_use": "T", "rag": "R"})
    assert render(chat) == "D"
    assert render(chat, tools=TOOLS) == "T"
    assert render(template({"default": "D"}), tools=TOOLS) == "D"
    with pytest.raises(ModelError, match=r'no chat template is called "default" \(has rag\)'):
        render(template({"rag": "R"}))


def directory_with(directory: Path, chat_template: Any) -> Tokenizer:
    (directory / "config.json").write_text("{}")
    core = tokenizers.Tokenizer(models.BPE(vocab={"<s>": 0, "</s>": 1}, merges=[]))
    core.save(str(directory / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": chat_template}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return load_tokenizer(directory)


def test_templates_are_found_in_each_place(tmp_path: Path) -> None:
    assert directory_with(tmp_path, "A{{ bos_token }}").apply_chat_template([]) == "A<s>"
    named = [{"name": "default", "template": "N"}, {"name": "tool_use", "template": "T"}]
    assert directory_with(tmp_path, named).apply_chat_template([]) == "N"
    assert (
        directory_with(tmp_path, named).apply_chat_template([], template_kwargs={"tools": TOOLS}) == "T"
    )
    (tmp_path / "chat_template.jinja").write_text("F")
    assert directory_with(tmp_path, "A").apply_chat_template([]) == "F"


def test_without_a_template_messages_are_refused_until_one_is_given(tmp_path: Path) -> None:
    tokenizer = directory_with(tmp_path, None)
    assert not tokenizer.has_chat_template
    with pytest.raises(ModelError, match="has no chat template: give one with --chat-template"):
        tokenizer.apply_chat_template([])
    given = tokenizer.with_chat_template("G{{ eos_token }}")
    assert given.has_chat_template
    assert given.apply_chat_template([]) == "G</s>"
