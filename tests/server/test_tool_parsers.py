"""Tool calls: whatever a model writes, and wherever the stream cuts it, the answer is the same."""

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvspan.server.answers import AnswerReader
from kvspan.server.tools.contract import Arguments, Call, CallBegins, CallBroken, Content, Tool, collect
from kvspan.server.tools.deepseek_v3 import CALL as DS_CALL
from kvspan.server.tools.deepseek_v3 import CLOSE as DS_CLOSE
from kvspan.server.tools.deepseek_v3 import END_CALL as DS_END
from kvspan.server.tools.deepseek_v3 import OPEN as DS_OPEN
from kvspan.server.tools.deepseek_v3 import SEPARATOR as DS_SEP
from kvspan.server.tools.registry import NAMES, STYLES, find_style

TOOLS = [
    Tool("weather", {"properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}),
    Tool(
        "write",
        {
            "properties": {
                "path": {"type": "string"},
                "lines": {"type": "array"},
                "mode": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                "force": {"type": "boolean"},
                "size": {"type": "number"},
            }
        },
    ),
]
KIMI = "<|tool_calls_section_begin|>{}<|tool_calls_section_end|>"
KIMI_CALL = "<|tool_call_begin|>{}<|tool_call_argument_begin|>{}<|tool_call_end|>"
PARIS = '{"city": "Paris"}'

# style, text, content, calls as (name, arguments)
WHOLE = {
    "hermes-one": (
        "hermes",
        f'Let me look.\n<tool_call>\n{{"name": "weather", "arguments": {PARIS}}}\n</tool_call>',
        "Let me look.\n",
        [("weather", {"city": "Paris"})],
    ),
    "hermes-two": (
        "hermes",
        f'\n\n<tool_call>{{"name":"weather","arguments":{PARIS}}}</tool_call>\n'
        '<tool_call>\n{"name": "write", "arguments": {"lines": ["}", "\\"{", "</tool_call>"]}}'
        "</tool_call>\n",
        "",
        [("weather", {"city": "Paris"}), ("write", {"lines": ["}", '"{', "</tool_call>"]})],
    ),
    "hermes-arguments-first": (
        "hermes",
        '<tool_call>{"arguments": {"city": "Köln é 🎉"}, "name": "weather"}</tool_call> done',
        " done",
        [("weather", {"city": "Köln é 🎉"})],
    ),
    "hermes-none-and-quoted": (
        "hermes",
        '<tool_call>{"name": "weather"}</tool_call>'
        '<tool_call>{"name": "weather", "arguments": "{\\"days\\": 2}"}</tool_call>'
        '<tool_call>{"name": "weather", "arguments": {}}</tool_call>',
        "",
        [("weather", {}), ("weather", {"days": 2}), ("weather", {})],
    ),
    "hermes-brace-forgotten": (
        "hermes",
        f'<tool_call>{{"name": "weather", "arguments": {PARIS}</tool_call>',
        "",
        [("weather", {"city": "Paris"})],
    ),
    "hermes-plain-line-break": (
        "hermes",
        '<tool_call>{"name": "weather", "arguments": {"city": "a\nb\tc"}}</tool_call>',
        "",
        [("weather", {"city": "a\nb\tc"})],
    ),
    "hermes-no-call": (
        "hermes",
        "a < b <tool <tool_cal\n <tool_call",
        "a < b <tool <tool_cal\n <tool_call",
        [],
    ),
    "coder": (
        "qwen3_coder",
        'Sure.\n\n<tool_call>\n<function=write>\n<parameter=path>\na "b"\n\nc\\n</parame\n</parameter>\n'
        '<parameter=lines>\n[1, {"a": null}]\n</parameter>\n<parameter=mode>\nnull\n</parameter>\n'
        "<parameter=force>\nTrue\n</parameter>\n<parameter=size>1.5</parameter>\n</function>\n</tool_call>",
        "Sure.\n\n",
        [
            (
                "write",
                {
                    "path": 'a "b"\n\nc\\n</parame',
                    "lines": [1, {"a": None}],
                    "mode": None,
                    "force": True,
                    "size": 1.5,
                },
            )
        ],
    ),
    "coder-empty-unknown-and-bare": (
        "qwen3_coder",
        "<function=weather>\n</function>\n<tool_call>\n<function=weather>\n<parameter=city>\n\n</parameter>"
        "<parameter=when>12</parameter><parameter=days>many</parameter></function></tool_call>\n",
        "",
        [("weather", {}), ("weather", {"city": "", "when": "12", "days": "many"})],
    ),
    "llama": (
        "llama3_json",
        f'\n{{"name": "weather", "parameters": {PARIS}}}; {{"name": "write", "parameters": {{}}}}',
        "",
        [("weather", {"city": "Paris"}), ("write", {})],
    ),
    "llama-tag": (
        "llama3_json",
        f'<|python_tag|>{{"name": "weather", "parameters": {PARIS}}}',
        "",
        [("weather", {"city": "Paris"})],
    ),
    "llama-just-json": (
        "llama3_json",
        '{"name": "Ada", "parameters": {"a": 1}}; and text',
        '{"name": "Ada", "parameters": {"a": 1}}; and text',
        [],
    ),
    "llama-text": ("llama3_json", "Well, {", "Well, {", []),
    "deepseek-v3": (
        "deepseek_v3",
        f"I look.{DS_OPEN}{DS_CALL}function{DS_SEP}weather\n```json\n{PARIS}\n```{DS_END}\n"
        f"{DS_CALL}function{DS_SEP}write\n```json\n{{}}\n```{DS_END}{DS_CLOSE}",
        "I look.",
        [("weather", {"city": "Paris"}), ("write", {})],
    ),
    "deepseek-v3.1": (
        "deepseek_v3",
        f"{DS_OPEN}{DS_CALL}weather{DS_SEP}{PARIS}{DS_END}{DS_CLOSE}bye",
        "bye",
        [("weather", {"city": "Paris"})],
    ),
    "kimi": (
        "kimi_k2",
        "Hm. "
        + KIMI.format(
            KIMI_CALL.format("functions.weather:0", PARIS) + KIMI_CALL.format(" functions.a.b:12 ", "{}")
        ),
        "Hm. ",
        [("weather", {"city": "Paris"}), ("a.b", {})],
    ),
}

# style, text: all of it is content
BROKEN = {
    "hermes-cut-in-arguments": ("hermes", 'x<tool_call>{"name": "weather", "arguments": {"city": "Pa'),
    "hermes-cut-in-name": ("hermes", '<tool_call>\n{"name": "wea'),
    "hermes-no-json": ("hermes", "<tool_call>weather(Paris)</tool_call> and more"),
    "hermes-bad-number": ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1.2.3}}</tool_call>'),
    "hermes-bad-bracket": ("hermes", '<tool_call>{"name": "f", "arguments": {"a": [1}}</tool_call>'),
    "hermes-unquoted": ("hermes", '<tool_call>{"name": "f", "arguments": {a: 1}}</tool_call>'),
    "hermes-name-is-no-name": ("hermes", '<tool_call>{"name": 5, "arguments": {}}</tool_call>'),
    "hermes-arguments-are-a-list": ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
    "coder-no-function": ("qwen3_coder", "<tool_call>\n<func>x</tool_call>"),
    "coder-no-name": ("qwen3_coder", "<tool_call>\n<function=>\n</function>"),
    "coder-cut-in-value": ("qwen3_coder", "<tool_call>\n<function=weather>\n<parameter=city>\nPar\n"),
    "coder-stray-text": ("qwen3_coder", "<function=weather>\noops</function></tool_call>"),
    "llama-cut": ("llama3_json", '{"name": "weather", "parameters": {"city": "P'),
    "llama-tag-and-code": ("llama3_json", "<|python_tag|>print(1)"),
    "deepseek-no-call": ("deepseek_v3", f"{DS_OPEN} nothing {DS_CLOSE}"),
    "deepseek-cut": ("deepseek_v3", f"t{DS_OPEN}{DS_CALL}function{DS_SEP}weather\n```json\n{{"),
    "deepseek-no-fence": ("deepseek_v3", f"{DS_OPEN}{DS_CALL}function{DS_SEP}weather\nParis{DS_END}"),
    "kimi-no-number": ("kimi_k2", KIMI.format(KIMI_CALL.format("weather", PARIS))),
    "kimi-no-json": ("kimi_k2", KIMI.format(KIMI_CALL.format("functions.weather:0", "Paris"))),
}


# style, text that ends in a mark which opens a call, content
BARE = {
    "hermes": ("hermes", "a\n<tool_call>\n", "a\n"),
    "hermes-alone": ("hermes", "\n<tool_call>", ""),
    "coder": ("qwen3_coder", "a<tool_call>\n<function=", "a"),
    "coder-half": ("qwen3_coder", "a<tool_call>\n<func", "a"),
    "llama": ("llama3_json", "<|python_tag|>", ""),
    "deepseek": ("deepseek_v3", f"a{DS_OPEN}{DS_CALL}", "a"),
    "kimi": ("kimi_k2", "a<|tool_calls_section_begin|>", "a"),
}


def parse(style: str, pieces: list[str]) -> list[object]:
    chosen, _ = find_style(style, chat_template="", architecture="")
    numbers = itertools.count()
    parser = chosen.parser(TOOLS, new_id=lambda: f"id{next(numbers)}")
    deltas = [delta for piece in pieces for delta in parser.push(piece)]
    return merged([*deltas, *parser.finish()])


def merged(deltas: list[object]) -> list[object]:
    """Neighbouring pieces of one text joined: all that a cut may change."""
    result: list[object] = []
    for delta in deltas:
        last = result[-1] if result else None
        if isinstance(delta, Content) and isinstance(last, Content):
            result[-1] = Content(last.text + delta.text)
        elif isinstance(delta, Arguments) and isinstance(last, Arguments) and delta.index == last.index:
            result[-1] = Arguments(delta.index, last.fragment + delta.fragment)
        else:
            result.append(delta)
    return result


@pytest.mark.parametrize(("style", "text", "content", "calls"), WHOLE.values(), ids=WHOLE)
def test_what_a_model_writes(style: str, text: str, content: str, calls: list[tuple[str, dict]]) -> None:
    said, found = collect(parse(style, [text]))
    assert said == content
    assert [(call.name, json.loads(call.arguments)) for call in found] == calls


@pytest.mark.parametrize(("style", "text"), BROKEN.values(), ids=BROKEN)
def test_a_broken_call_is_content_and_not_lost(style: str, text: str) -> None:
    assert collect(parse(style, [text])) == (text, [])


@pytest.mark.parametrize(("style", "text", "content"), BARE.values(), ids=BARE)
def test_a_mark_that_opens_nothing_is_no_content(style: str, text: str, content: str) -> None:
    assert collect(parse(style, [text])) == (content, [])


ALL = {name: case[:2] for name, case in (WHOLE | BROKEN | BARE).items()}

MARKS = {
    "hermes": ("<tool_call>",),
    "qwen3_coder": ("<tool_call>", "<function="),
    "llama3_json": ("<|python_tag|>",),
    "deepseek_v3": (DS_OPEN, DS_CALL),
    "kimi_k2": ("<|tool_calls_section_begin|>", "<|tool_call_begin|>"),
}


def all_is_said(style: str, text: str, said: str) -> bool:
    """Whether content is all of a text, but for marks at its end that open nothing."""
    left = text.removeprefix(said).strip() if text.startswith(said) else "?"
    while mark := next((mark for mark in MARKS[style] if left.startswith(mark)), None):
        left = left.removeprefix(mark).strip()
    return any(mark.startswith(left) for mark in MARKS[style])


@pytest.mark.parametrize(("style", "text"), ALL.values(), ids=ALL)
def test_no_cut_changes_an_answer(style: str, text: str) -> None:
    whole = parse(style, [text])
    assert parse(style, list(text)) == whole
    for at in range(len(text) + 1):
        assert parse(style, [text[:at], text[at:]]) == whole, f"cut at {at}"


@pytest.mark.parametrize(("style", "text"), ALL.values(), ids=ALL)
def test_no_end_loses_text(style: str, text: str) -> None:
    """Wherever `max_tokens` ends the text, what is said and called is what was written."""
    for at in range(len(text) + 1):
        said, calls = collect(parse(style, [text[:at]]))
        assert calls or all_is_said(style, text[:at], said), f"ended at {at}"


def test_a_mark_that_is_cut_after_a_whole_call_is_no_content() -> None:
    text = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>\n<tool_call>\n'
    for at in range(text.index("}}") + 2, len(text) + 1):
        said, calls = collect(parse("hermes", [text[:at]]))
        assert (said, len(calls)) == ("", 1), f"ended at {at}"


FRAGMENTS = [
    *(sign for style in STYLES for sign in style.signs),
    *(
        "<tool_call>",
        "</tool_call>",
        '{"name": "weather", "arguments": ',
        '{"name": "weather", "parameters": ',
    ),
    *(
        "<function=weather>",
        "</function>",
        "<parameter=city>",
        "</parameter>",
        PARIS,
        "{",
        "}",
        '"',
        "\\",
    ),
    *(
        DS_OPEN,
        DS_CALL,
        DS_SEP,
        DS_END,
        DS_CLOSE,
        "function",
        "```json",
        "```",
        ";",
        " ",
        "\n",
        "x",
        "🎉",
        "<",
    ),
    *("functions.weather:0", "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
]


@settings(max_examples=400, deadline=None)
@given(style=st.sampled_from(NAMES), pieces=st.lists(st.sampled_from(FRAGMENTS), max_size=14))
def test_nonsense_in_any_cut_is_the_same_nonsense(style: str, pieces: list[str]) -> None:
    text = "".join(pieces)
    whole = parse(style, [text])
    assert parse(style, list(text)) == whole
    assert parse(style, pieces) == whole
    said, calls = collect(whole)
    assert calls or all_is_said(style, text, said)
    assert all(isinstance(json.loads(call.arguments), dict) for call in calls)


def stream(style: str, text: str) -> tuple[str, str]:
    """Content and arguments as a stream tells them."""
    chosen, _ = find_style(style, chat_template="", architecture="")
    reader = AnswerReader(tools=chosen.parser(TOOLS, new_id=lambda: "id"))
    additions = [each for character in text for each in reader.push(character, [])]
    additions += reader.finish()
    parts = [part.function.arguments for each in additions for part in each.tool_calls]
    return "".join(each.content for each in additions), "".join(map(str, parts))


@pytest.mark.parametrize(
    ("style", "text", "content", "arguments"),
    [
        ("hermes", 'x<tool_call>{"name": "weather", "arguments": {"city": "Pa', "x", '{"city": "Pa'),
        ("hermes", '<tool_call>{"name": "wea', '<tool_call>{"name": "wea', ""),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": oops}}', "oops}}", '{"a": '),
        (
            "qwen3_coder",
            "<tool_call>\n<function=write>\n<parameter=path>\na\n</parameter>\n<parameter=size>\n1",
            *("", '{"path": "a", "size": '),
        ),
        ("kimi_k2", KIMI_CALL.format("functions.weather:0", '{"a":')[:-17], "", '{"a":'),
    ],
    ids=["cut", "cut before its name", "malformed", "coder", "kimi"],
)
def test_what_is_told_as_a_call_is_not_told_again(
    style: str, text: str, content: str, arguments: str
) -> None:
    assert stream(style, text) == (content, arguments)


def test_arguments_come_while_they_are_written() -> None:
    style, _ = find_style("qwen3_coder", chat_template="", architecture="")
    parser = style.parser(TOOLS, new_id=lambda: "id")
    parser.push("<function=write>\n<parameter=path>\n")
    assert parser.push("half a p") == [Arguments(0, "half a p")]
    style, _ = find_style("hermes", chat_template="", architecture="")
    parser = style.parser(TOOLS, new_id=lambda: "id")
    assert parser.push('<tool_call>{"name": "weather", "arguments": ') == []
    assert parser.push('{"ci') == [CallBegins(0, "id", "weather"), Arguments(0, '{"ci')]
    assert parser.push('ty"') == [Arguments(0, 'ty"')]
    assert parser.finish()[0] == CallBroken(0, '<tool_call>{"name": "weather", "arguments": {"city"')


def test_text_that_cannot_become_a_mark_is_not_held_back() -> None:
    for style in STYLES:
        parser = style.parser(TOOLS, new_id=lambda: "id")
        assert parser.push("One <b ") == [Content("One <b ")], style.name


def test_kimi_keeps_the_models_own_ids() -> None:
    _, calls = collect(parse("kimi_k2", [WHOLE["kimi"][1]]))
    assert calls[0] == Call("functions.weather:0", "weather", PARIS)


@pytest.mark.parametrize(
    ("template", "architecture", "name"),
    [
        ("{{ '<tool_call>' }}", "Qwen3ForCausalLM", "hermes"),
        ("<tool_call> <function=..> <parameter=..>", "Qwen3MoeForCausalLM", "qwen3_coder"),
        (f"{{{{ '{DS_CALL}' }}}}", "DeepseekV3ForCausalLM", "deepseek_v3"),
        ("<|tool_call_begin|>", "DeepseekV3ForCausalLM", "kimi_k2"),
        ('{"name": function name, "parameters": dict}', "LlamaForCausalLM", "llama3_json"),
        ("", "Qwen2ForCausalLM", "hermes"),
        ("", "LlamaForCausalLM", "hermes"),
    ],
)
def test_auto_looks_at_the_template_first(template: str, architecture: str, name: str) -> None:
    style, why = find_style("auto", chat_template=template, architecture=architecture)
    assert (style.name, bool(why)) == (name, True)
