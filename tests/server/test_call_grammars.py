"""What `tool_choice` forces: every style's grammar writes calls that the style's parser reads."""

import json
import random
from pathlib import Path

import numpy as np
import pytest

from kvspan.loading.tokenizer import Tokenizer, load_tokenizer
from kvspan.sampling.grammar import Grammars
from kvspan.server.tools.contract import Tool, collect
from kvspan.server.tools.registry import STYLES, Style
from kvspan.structured import StructuredOutputsParams
from kvspan.testing.checkpoints import write_tokenizer

VOCAB_SIZE, EOS = 259, 2
LOOK = Tool(
    "look",
    {
        "type": "object",
        "properties": {
            "n": {"type": "integer", "minimum": 0, "maximum": 99},
            "kind": {"type": "string", "enum": ["a", 'b "c"']},
            "flags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2, "uniqueItems": True},
        },
        "required": ["n", "kind"],
        "additionalProperties": False,
    },
)
WRITE = Tool("write", {"properties": {"text": {"type": "string"}}, "required": ["text"]})
BARE = Tool("bare", {"type": "object", "properties": {}, "additionalProperties": False})


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("tokens")
    write_tokenizer(directory, vocab_size=VOCAB_SIZE)
    (directory / "config.json").write_text(json.dumps({"eos_token_id": EOS}))
    return load_tokenizer(directory)


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Grammars:
    return Grammars(tokenizer.to_json, vocab_size=VOCAB_SIZE, eos_token_ids=[EOS])


def form(style: Style, *tools: Tool, several: bool) -> StructuredOutputsParams:
    return StructuredOutputsParams(grammar=style.lark(tools, several=several))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("style", STYLES, ids=lambda style: style.name)
def test_what_is_forced_is_a_call(
    grammars: Grammars, tokenizer: Tokenizer, style: Style, seed: int
) -> None:
    grammar = grammars.start(form(style, LOOK, BARE, several=False))
    chance, tokens = random.Random(seed), list[int]()
    while not grammar.ended:
        bits = np.unpackbits(np.frombuffer(grammar.mask(), np.uint8), bitorder="little")
        tokens.append(chance.choice(np.flatnonzero(bits).tolist()))
        grammar.accept(tokens[-1])
        assert grammar.failure is None
    text = tokenizer.decode(tokens)
    parser = style.parser([LOOK, BARE], new_id=lambda: "id")
    content, calls = collect([*parser.push(text), *parser.finish()])
    assert content == "", text
    assert [call.name for call in calls] in (["look"], ["bare"])
    arguments = json.loads(calls[0].arguments)
    if calls[0].name == "look":
        assert 0 <= arguments["n"] <= 99
        assert arguments["kind"] in ("a", 'b "c"')
        assert set(arguments) <= {"n", "kind", "flags"}
    else:
        assert arguments == {}


CALLS = {
    "hermes": '<tool_call>\n{"name": "write", "arguments": {"text": "a\\n</parameter>"}}\n</tool_call>',
    "llama3_json": '{"name": "write", "parameters": {"text": "a\\n</parameter>"}}',
    "qwen3_coder": "<tool_call>\n<function=write>\n<parameter=text>\na\n</param\n"
    "</parameter>\n</function>\n</tool_call>",
}


@pytest.mark.parametrize("name", CALLS)
def test_free_text_in_arguments_is_free(grammars: Grammars, tokenizer: Tokenizer, name: str) -> None:
    style = next(each for each in STYLES if each.name == name)
    grammar = grammars.start(form(style, WRITE, several=True))
    for token in tokenizer.encode(CALLS[name], add_special_tokens=False):
        grammar.accept(token)
        assert grammar.failure is None
    bits = np.unpackbits(np.frombuffer(grammar.mask(), np.uint8), bitorder="little")
    assert bits[EOS]
    assert bits.sum() > 1  # another call may follow


@pytest.mark.parametrize("style", STYLES, ids=lambda style: style.name)
def test_names_and_keys_of_any_spelling(grammars: Grammars, style: Style, tmp_path: Path) -> None:
    odd = Tool("a.b-c'd", {"properties": {'k "1"': {"type": "integer"}, "\\": {"type": "null"}}})
    grammars.check(form(style, odd, several=True))
