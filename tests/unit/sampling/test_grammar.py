"""Forms: what a random walk over allowed tokens writes has the form that was asked for."""

import json
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvspan.errors import RequestError
from kvspan.loading.tokenizer import Tokenizer, load_tokenizer
from kvspan.sampling.grammar import Grammar, Grammars, left_out
from kvspan.structured import StructuredOutputsParams
from kvspan.testing.checkpoints import write_tokenizer

VOCAB_SIZE = 261  # all bytes, some tokens that mean nothing, and no multiple of 8
EOS = 2


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("tokens")
    write_tokenizer(directory, vocab_size=259)
    (directory / "config.json").write_text(json.dumps({"eos_token_id": EOS}))
    return load_tokenizer(directory)


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Grammars:
    return Grammars(tokenizer.to_json, vocab_size=VOCAB_SIZE, eos_token_ids=[EOS])


def allowed(grammar: Grammar) -> list[int]:
    mask = grammar.mask()
    assert len(mask) == -(-VOCAB_SIZE // 8)
    return np.flatnonzero(np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")).tolist()


def walk(grammar: Grammar, tokenizer: Tokenizer, *, seed: int, limit: int = 600) -> str:
    chance, tokens = random.Random(seed), list[int]()
    while not grammar.ended:
        assert len(tokens) < limit, "a form without an end"
        tokens.append(chance.choice(allowed(grammar)))
        assert tokens[-1] < VOCAB_SIZE
        grammar.accept(tokens[-1])
        assert grammar.failure is None
    return tokenizer.decode(tokens)


def schemas() -> st.SearchStrategy[dict[str, Any]]:
    leaves = st.one_of(
        st.builds(lambda n: {"type": "string", "maxLength": n}, st.integers(0, 5)),
        st.builds(
            lambda a, b: {"type": "integer", "minimum": a, "maximum": a + b}, *[st.integers(0, 99)] * 2
        ),
        st.builds(
            lambda v: {"enum": v},
            st.lists(st.one_of(st.booleans(), st.text("ab}", max_size=3)), min_size=1),
        ),
        st.just({"type": "boolean"}),
        st.just({"type": "null"}),
    )
    names = st.text("abc", min_size=1, max_size=3)
    return st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.builds(
                lambda i, n: {"type": "array", "items": i, "maxItems": n}, inner, st.integers(0, 2)
            ),
            st.builds(
                lambda p, k: {
                    "type": "object",
                    "properties": p,
                    "required": sorted(p)[:k],
                    "additionalProperties": False,
                },
                st.dictionaries(names, inner, max_size=3),
                st.integers(0, 3),
            ),
        ),
        max_leaves=4,
    )


def fits(value: Any, schema: dict[str, Any]) -> bool:
    """JSON Schema, as far as `schemas` goes; written to be obviously right."""
    if "enum" in schema:
        return any(value == each and type(value) is type(each) for each in schema["enum"])
    kind = schema["type"]
    if kind == "string":
        return isinstance(value, str) and len(value) <= schema["maxLength"]
    if kind == "integer":
        return type(value) is int and schema["minimum"] <= value <= schema["maximum"]
    if kind == "boolean":
        return isinstance(value, bool)
    if kind == "null":
        return value is None
    if kind == "array":
        is_list = isinstance(value, list) and len(value) <= schema["maxItems"]
        return is_list and all(fits(each, schema["items"]) for each in value)
    known = schema["properties"]
    is_object = isinstance(value, dict) and set(schema["required"]) <= set(value) <= set(known)
    return is_object and all(fits(each, known[name]) for name, each in value.items())


@settings(max_examples=120, deadline=None)
@given(schema=schemas(), seed=st.integers(0, 9999))
def test_random_walks_fit_random_schemas(
    grammars: Grammars, tokenizer: Tokenizer, schema: dict[str, Any], seed: int
) -> None:
    text = walk(grammars.start(StructuredOutputsParams(json=schema)), tokenizer, seed=seed)
    assert fits(json.loads(text), schema), f"{text!r} does not fit {schema}"


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("asked", "pattern"),
    [
        (StructuredOutputsParams(regex=r"^[a-c]{2,4}-\d$"), r"[a-c]{2,4}-[0-9]"),
        (StructuredOutputsParams(choice=["yes", "no", 'quo"te']), 'yes|no|quo"te'),
        (StructuredOutputsParams(grammar='start: "a" b\nb: "x" | "y"'), "a[xy]"),
        (StructuredOutputsParams(grammar='root ::= "a" ("x" | "y")'), "a[xy]"),
        (StructuredOutputsParams(json={"type": "boolean"}), "true|false"),
        (StructuredOutputsParams(regex="[01]{3}", after="</t>"), r"(?s:.*)</t>\n*[01]{3}"),
    ],
    ids=lambda value: value.kind if isinstance(value, StructuredOutputsParams) else value,
)
def test_every_kind_of_form(
    grammars: Grammars, tokenizer: Tokenizer, asked: StructuredOutputsParams, pattern: str, seed: int
) -> None:
    grammar = grammars.start(asked)
    if asked.after:
        for token in tokenizer.encode("hm <t </t>", add_special_tokens=False):
            assert token in allowed(grammar)
            grammar.accept(token)
        assert re.fullmatch("\n*[01]{3}", walk(grammar, tokenizer, seed=seed))
    else:
        assert re.fullmatch(pattern, walk(grammar, tokenizer, seed=seed))


@pytest.mark.parametrize("thought", ["", "<t>", "<t>hm </t>\n\n"])
def test_a_thought_that_may_be_left_out(grammars: Grammars, tokenizer: Tokenizer, thought: str) -> None:
    asked = StructuredOutputsParams(regex="[01]{3}", opening="<t>", after="</t>")
    grammar = grammars.start(asked)
    for token in tokenizer.encode(thought, add_special_tokens=False):
        assert token in allowed(grammar)
        grammar.accept(token)
    zero, letter = tokenizer.encode("0q", add_special_tokens=False)
    assert zero in allowed(grammar)
    assert (letter in allowed(grammar)) == (thought == "<t>")


def test_a_whole_text_may_end_or_go_on(grammars: Grammars, tokenizer: Tokenizer) -> None:
    grammar = grammars.start(StructuredOutputsParams(regex="ab|abc"))
    for token in tokenizer.encode("ab", add_special_tokens=False):
        grammar.accept(token)
    assert allowed(grammar) == sorted([EOS, *tokenizer.encode("c", add_special_tokens=False)])
    assert not grammar.ended
    grammar.accept(EOS)
    assert grammar.ended
    assert grammar.failure is None


def test_states_of_one_form_are_apart(grammars: Grammars, tokenizer: Tokenizer) -> None:
    asked = StructuredOutputsParams(choice=["ax", "by"])
    one, other = grammars.start(asked), grammars.start(asked)
    one.accept(tokenizer.encode("a", add_special_tokens=False)[0])
    assert tokenizer.decode(allowed(one)) == "x"
    assert sorted(tokenizer.decode(allowed(other))) == ["a", "b"]


def test_space_in_json_has_an_end(grammars: Grammars, tokenizer: Tokenizer) -> None:
    grammar = grammars.start(StructuredOutputsParams(json_object=True))
    brace, blank = tokenizer.encode("{\n", add_special_tokens=False)
    grammar.accept(brace)
    for _ in range(40):
        assert blank in allowed(grammar)
        grammar.accept(blank)
    assert blank not in allowed(grammar)
    strict = StructuredOutputsParams(json_object=True, disable_any_whitespace=True)
    grammar = grammars.start(strict)
    grammar.accept(brace)
    assert blank not in allowed(grammar)


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"json": {"type": "foo"}}, "Invalid type: foo"),
        ({"json": '{"type": '}, "no JSON"),
        ({"json": 5}, "JSON schema"),
        ({"json": {"type": "string", "pattern": "("}}, "unclosed group"),
        ({"json": {"$ref": "http://example.com/x"}}, "example.com"),
        ({"json": False}, "JSON schema"),
        ({"regex": "("}, "unclosed group"),
        ({"grammar": "start: foo"}, "foo"),
        ({"grammar": "start: start"}, "no text fits"),
        ({"regex": r"[^\s\S]"}, "no text fits"),
        ({"json": {"$ref": "#"}}, "no text fits"),
        ({"choice": []}, "list of strings"),
        ({"choice": ["a", 3]}, "not empty, got 3"),
        ({}, "exactly one of"),
        ({"regex": "a", "json": {}}, "regex and json|json and regex"),
        ({"structural_tag": "x"}, "use tools"),
        ({"jsn": {}}, "has no 'jsn'"),
        ([], "must be an object"),
    ],
    ids=repr,
)
def test_a_bad_form_is_refused_by_its_reason(grammars: Grammars, asked: Any, reason: str) -> None:
    with pytest.raises(RequestError, match=reason):
        grammars.check(StructuredOutputsParams.from_mapping(asked))


def test_a_model_without_a_tokenizer_says_so() -> None:
    with pytest.raises(RequestError, match="needs a tokenizer"):
        Grammars(None, vocab_size=8, eos_token_ids=[]).start(StructuredOutputsParams(regex="a"))


def test_a_form_needs_no_torch(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, vocab_size=259)
    program = (
        "import sys, pathlib\n"
        "from kvspan.sampling.grammar import Grammars\n"
        "from kvspan.structured import StructuredOutputsParams as S\n"
        f"text = pathlib.Path({str(tmp_path / 'tokenizer.json')!r}).read_text()\n"
        "grammars = Grammars(lambda: text, vocab_size=261, eos_token_ids=[2])\n"
        "assert any(grammars.start(S(json={'type': 'object'})).mask())\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


@pytest.mark.parametrize(
    ("schema", "names"),
    [
        (
            {"type": "array", "items": {"enum": [1, 2]}, "maxItems": 2, "uniqueItems": True},
            ["uniqueItems"],
        ),
        (
            {
                "type": "object",
                "properties": {"a": {"type": "string", "format": "colour", "maxLength": 2}},
                "dependentRequired": {"a": ["b"]},
                "additionalProperties": False,
            },
            ["dependentRequired", "format colour"],
        ),
        ({"oneOf": [{"enum": ["a", "b"]}, {"enum": ["b", "c"]}]}, ["oneOf (as anyOf)"]),
        (
            {
                "type": "object",
                "properties": {
                    key: {"type": "string", "format": "zz", "maxLength": 1, "not": {}} for key in "abc"
                },
                "additionalProperties": False,
            },
            ["format zz", "not"],
        ),
        ({"enum": ["a"], "title": "x", "my own": 1}, []),
    ],
    ids=["an array", "an object", "oneOf", "several times", "all held to"],
)
def test_a_lenient_form_tells_what_it_leaves_out(
    grammars: Grammars, tokenizer: Tokenizer, schema: Any, names: list[str]
) -> None:
    asked = StructuredOutputsParams(json=schema, lenient=True)
    json.loads(walk(grammars.start(asked), tokenizer, seed=1))
    assert sorted(left_out(asked)) == names
    if names:
        with pytest.raises(RequestError, match="|".join(name.split()[0] for name in names)):
            grammars.check(StructuredOutputsParams(json=schema))


def test_of_a_form_that_is_refused_nothing_is_left_out() -> None:
    assert left_out(StructuredOutputsParams(json={"type": "x"}, lenient=True)) == ()
