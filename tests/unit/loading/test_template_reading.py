"""What is found out about chat templates, by templates that are like those of well-known models."""

from typing import Any

import pytest

from kvspan.loading.chat_template import ChatTemplate
from kvspan.loading.template_reading import Reading

LIKE = {
    "smollm2": "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] }}"
    "{{ '<|im_end|>' }}{% endfor %}",
    "written-as-it-is": "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}",
    "qwen": "{% if tools %}{% for t in tools %}{{ t | tojson }}{% endfor %}{% endif %}"
    "{% for m in messages %}{% if m.tool_calls %}{% if m.content %}{{ m.content }}{% endif %}"
    "{% for c in m.tool_calls %}<tool_call>{{ c.function.name }}{{ c.function.arguments | tojson }}"
    "{% endfor %}{% else %}{{ m.content + '|' }}{% endif %}{% endfor %}",
    "deepseek-v3": "{% for m in messages %}{% if m.role == 'assistant' and m.content is none %}"
    "{% for c in m.tool_calls %}{{ c['type'] + c['function']['name'] + c['function']['arguments'] }}"
    "{% endfor %}{% elif m.role == 'tool' %}{{ 'R' + m.content }}{% else %}{{ 'C' + m.content }}"
    "{% endif %}{% endfor %}",
    "content-and-calls": "{% for m in messages %}{{ m.content + '|' }}{% for c in m.tool_calls or [] %}"
    "{{ c.function.name ~ (c.function.arguments | tojson) }}{% endfor %}{% endfor %}",
    "arguments-as-they-are": "{% for m in messages %}{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}({{ c.function.arguments }}){% endfor %}"
    "{% endfor %}",
    "only-with-system": "{% for m in messages %}{% if m.role == 'system' and tools %}"
    "{{ tools[0].function.name }}{% endif %}{% endfor %}",
    "no-tool-role": "{% for m in messages %}{% if m.role not in ('system', 'user', 'assistant') %}"
    "{{ raise_exception('no such role') }}{% endif %}{{ m.content }}{% endfor %}",
    "refuses-all": "{{ raise_exception('never') }}",
    "asks-if-there-are-tools": "{% if tools %}You have tools.{% endif %}{{ messages[0].content }}",
}


def reading(source: str) -> Reading:
    return ChatTemplate({"default": source}, where="test", special_tokens={}).reading


@pytest.mark.parametrize(
    ("name", "shows_tools", "shows_calls", "takes_null", "takes_objects"),
    [
        ("smollm2", False, False, False, True),
        ("written-as-it-is", False, False, False, True),
        ("qwen", True, True, True, True),
        ("deepseek-v3", False, True, True, False),
        ("content-and-calls", False, True, False, True),
        ("arguments-as-they-are", False, True, True, False),
        ("only-with-system", True, False, True, True),
        ("no-tool-role", False, False, False, True),
        ("refuses-all", True, True, False, True),
        ("asks-if-there-are-tools", False, False, True, True),
    ],
)
def test_what_templates_show_and_take(
    name: str, shows_tools: bool, shows_calls: bool, takes_null: bool, takes_objects: bool
) -> None:
    found = reading(LIKE[name])
    assert (found.shows_tools, found.shows_calls) == (shows_tools, shows_calls)
    assert (found.takes_null, found.takes_objects) == (takes_null, takes_objects)


@pytest.mark.parametrize(
    ("source", "reads"),
    [
        ("{% if reasoning_effort is not defined %}{% set reasoning_effort = 'low' %}{% endif %}"
         "{{ reasoning_effort }}", True),
        ("{% if messages[0].reasoning_effort %}{% endif %}reasoning_effort", False),
        ("{% generation %}{{ reasoning_effort }}{% endgeneration %}", True),
    ],
    ids=["like gpt-oss", "of a message", "inside a block"],
)  # fmt: skip
def test_names_that_a_template_looks_up(source: str, reads: bool) -> None:
    assert ("reasoning_effort" in reading(source).variables) == reads


def test_the_template_for_tools_is_the_one_that_is_asked() -> None:
    sources: Any = {"default": "D", "tool_use": "{{ tools[0].function.name }}"}
    chat = ChatTemplate(sources, where="test", special_tokens={})
    assert chat.reading.shows_tools
