"""Stop strings against known answers, and against a search that sees one more character at a time."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvspan.sampling.stop import Released, StopChecker

texts = st.text("ab\n<", max_size=40)
stops = st.lists(st.text("ab\n<", min_size=1, max_size=5), max_size=4)


def pushed(checker: StopChecker, pieces: Sequence[str]) -> tuple[list[str], str | None]:
    """Pushes until a stop string is found; the pieces let through, flushed at the end."""
    out = []
    for piece in pieces:
        released = checker.push(piece)
        out.append(released.text)
        if released.stop is not None:
            return out, released.stop
    return [*out, checker.flush()], None


def naive(text: str, stop: Sequence[str], *, include: bool) -> tuple[str, str | None]:
    """The first place at which the text so far ends with a stop string, the longest of them."""
    for end in range(1, len(text) + 1):
        complete = [s for s in stop if text[:end].endswith(s)]
        if complete:
            longest = max(complete, key=len)
            return text[: end if include else end - len(longest)], longest
    return text, None


def cut(text: str, sizes: Sequence[int]) -> list[str]:
    pieces = []
    for size in sizes:
        pieces.append(text[:size])
        text = text[size:]
    return [*pieces, text]


def test_a_stop_string_across_tokens_does_not_leak() -> None:
    pieces, stop = pushed(StopChecker(["own fox"]), ["The", " quick", " brown", " fox", " jumps"])
    assert "".join(pieces) == "The quick br"
    assert pieces == ["The", " quick", " br", ""]
    assert stop == "own fox"


def test_text_that_looked_like_a_stop_string_comes_out_in_full() -> None:
    checker = StopChecker(["\n<|endoftext|>"])
    assert checker.push("a\n") == Released("a")
    assert checker.push("b") == Released("\nb")
    assert checker.flush() == ""


def test_text_held_at_the_end_comes_out_once() -> None:
    checker = StopChecker(["\n<|endoftext|>"])
    assert pushed(checker, ["a", "\n", "b", "\n<|"]) == (["a", "", "\nb", "", "\n<|"], None)
    assert checker.flush() == ""


def test_what_follows_a_stop_string_in_its_piece_is_dropped() -> None:
    assert StopChecker(["ST"]).push("oneSTtwo") == Released("one", "ST")
    assert StopChecker(["ST"], include_stop=True).push("oneSTtwo") == Released("oneST", "ST")


def test_the_stop_string_that_is_complete_first_wins() -> None:
    assert StopChecker(["abcd", "bc"]).push("abcd") == Released("a", "bc")
    assert StopChecker(["bc", "abc"]).push("abc") == Released("", "abc")


def test_with_the_stop_string_included_nothing_is_held_back() -> None:
    checker = StopChecker(["own fox"], include_stop=True)
    assert pushed(checker, [" brown", " fox", "!"]) == ([" brown", " fox"], "own fox")


def test_before_min_tokens_a_stop_string_is_text() -> None:
    checker = StopChecker(["END"])
    assert checker.push("aEND", may_stop=False) == Released("aEND")
    assert checker.push("bEN", may_stop=False) == Released("b")
    assert checker.push("D", may_stop=True) == Released("", "END")


def test_only_the_end_of_a_stop_string_must_come_after_min_tokens() -> None:
    checker = StopChecker(["aa"])
    assert checker.push("aa", may_stop=False) == Released("a")
    assert checker.push("a") == Released("", "aa")


def test_a_stop_string_inside_what_is_held_back_does_not_count_later() -> None:
    checker = StopChecker(["bc", "abcd"])
    assert checker.push("abc", may_stop=False) == Released("")
    assert checker.push("x") == Released("abcx")


def test_a_long_stop_string_costs_its_length_once() -> None:
    stop = "a" * 20_000 + "b"
    pieces, found = pushed(StopChecker([stop]), ["a"] * 30_000 + ["b"])
    assert (len("".join(pieces)), found) == (10_000, stop)


@settings(max_examples=200, deadline=None)
@given(text=texts, stop=stops, sizes=st.lists(st.integers(0, 6), max_size=15), include=st.booleans())
def test_pieces_are_as_good_as_the_whole(
    text: str, stop: list[str], sizes: list[int], include: bool
) -> None:
    pieces, found = pushed(StopChecker(stop, include_stop=include), cut(text, sizes))
    assert ("".join(pieces), found) == naive(text, stop, include=include)


@settings(max_examples=200, deadline=None)
@given(text=texts, stop=stops)
def test_no_more_is_held_back_than_could_become_a_stop_string(text: str, stop: list[str]) -> None:
    checker = StopChecker(stop)
    out = ""
    for i, character in enumerate(text):
        released = checker.push(character)
        out += released.text
        if released.stop is not None:
            return
        prefixes = [s[:n] for s in stop for n in range(1, len(s))]
        held = max((p for p in prefixes if text[: i + 1].endswith(p)), key=len, default="")
        assert out + held == text[: i + 1]


@pytest.mark.parametrize("stop", [[], ["zz"]])
def test_empty_pieces_are_ordinary(stop: list[str]) -> None:
    checker = StopChecker(stop)
    assert [checker.push(p).text for p in ("", "a", "")] == ["", "a", ""]
    assert checker.flush() == ""
