"""Thoughts and answers: told apart wherever the stream is cut."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvspan.server.reasoning.registry import NAMES, STYLES, find_style
from kvspan.server.reasoning.split import Beginning, ReasoningSplitter, ReasoningStyle, Split

QWEN3 = ReasoningStyle(name="qwen3")

# begins inside a thought, text, thought, content
CASES = {
    "thought-and-answer": (False, "<think>\nHm. 2 < 3\n\n</think>\n\nThree.\n", "Hm. 2 < 3", "Three.\n"),
    "opened-by-the-template": (True, "Hm.\n</think>\n\nThree.", "Hm.", "Three."),
    "opened-twice": (True, "<think>\nHm.</think>Three.", "Hm.", "Three."),
    "no-thought": (False, "Three </think> <think>no", "", "Three </think> <think>no"),
    "empty-thought": (False, "<think>\n\n</think>\n\nThree.", "", "Three."),
    "never-ends": (True, "Hm, </thin", "Hm, </thin", ""),
    "only-space-before": (False, " \n<think>a</think>b", "a", "b"),
    "only-space": (False, " \n", "", " \n"),
    "half-a-mark": (False, "<thi", "", "<thi"),
    "mark-again": (False, "<think>a</think>b<think>c</think>", "a", "b<think>c</think>"),
    "indented-answer": (False, "<think>a </think>\n  code", "a", "  code"),
}


def split(style: ReasoningStyle, pieces: list[str], *, inside: bool) -> tuple[str, str]:
    splitter = ReasoningSplitter(style, inside=inside)
    parts = [*(splitter.push(piece) for piece in pieces), splitter.finish()]
    return "".join(p.reasoning for p in parts), "".join(p.content for p in parts)


@pytest.mark.parametrize(("inside", "text", "thought", "content"), CASES.values(), ids=CASES)
def test_every_cut_gives_the_same(inside: bool, text: str, thought: str, content: str) -> None:
    for at in range(len(text) + 1):
        assert split(QWEN3, [text[:at], text[at:]], inside=inside) == (thought, content), f"cut at {at}"
    assert split(QWEN3, list(text), inside=inside) == (thought, content)


@settings(max_examples=300, deadline=None)
@given(
    inside=st.booleans(),
    pieces=st.lists(
        st.sampled_from(["<think>", "</think>", "<", "/", "think", ">", " ", "\n", "x", "é"])
    ),
)
def test_nonsense_in_any_cut_is_the_same_nonsense(inside: bool, pieces: list[str]) -> None:
    text = "".join(pieces)
    whole = split(QWEN3, [text], inside=inside)
    assert split(QWEN3, list(text), inside=inside) == whole
    assert split(QWEN3, pieces, inside=inside) == whole


def test_a_thought_comes_while_it_is_thought() -> None:
    splitter = ReasoningSplitter(QWEN3, inside=True)
    assert splitter.push("One") == Split(reasoning="One")
    assert splitter.push(" two\n") == Split(reasoning=" two")
    assert not splitter.in_content
    assert splitter.push("three</think>four") == Split(reasoning="\nthree", content="four")
    assert splitter.in_content
    assert splitter.push(" five") == Split(content=" five")


@pytest.mark.parametrize(
    ("prompt", "qwen3", "deepseek_r1"),
    [
        ("<|im_start|>assistant\n", Beginning.OPEN, Beginning.INSIDE),
        ("<|im_start|>assistant\n<think>\n", Beginning.INSIDE, Beginning.INSIDE),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", Beginning.CONTENT, Beginning.CONTENT),
        ("a<think>b</think>c<|im_start|>assistant\n", Beginning.OPEN, Beginning.INSIDE),
    ],
)
def test_the_prompt_says_how_an_answer_begins(
    prompt: str, qwen3: Beginning, deepseek_r1: Beginning
) -> None:
    by_name = {style.name: style for style in STYLES}
    assert by_name["qwen3"].beginning(prompt) is qwen3
    assert by_name["deepseek_r1"].beginning(prompt) is deepseek_r1


def test_auto_looks_for_the_marks_in_the_template() -> None:
    assert find_style("auto", chat_template="..</think>..")[0] == QWEN3
    assert find_style("auto", chat_template="")[0] is None
    assert find_style("none", chat_template="</think>")[0] is None
    assert find_style("seed_oss", chat_template="")[0].opening == "<seed:think>"
    assert {"deepseek_r1", "qwen3", "none"} <= set(NAMES)
