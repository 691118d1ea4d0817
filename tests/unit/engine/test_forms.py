"""A form that can be held to no longer ends its request with a sentence, and no other's."""

import pytest

from kvspan.engine.forms import FREE, Forms, Held
from kvspan.loading.tokenizer import load_tokenizer
from kvspan.request import SamplingParams
from kvspan.sampling.grammar import Grammars
from kvspan.structured import StructuredOutputsParams
from kvspan.testing.checkpoints import write_tokenizer
from kvspan.testing.forms import EXPLOSIVE

LENGTH = 400


@pytest.fixture(scope="module")
def grammars(tmp_path_factory: pytest.TempPathFactory) -> Grammars:
    directory = tmp_path_factory.mktemp("tokens")
    write_tokenizer(directory, vocab_size=259)
    (directory / "config.json").write_text('{"eos_token_id": 2}')
    return Grammars(load_tokenizer(directory).to_json, vocab_size=261, eos_token_ids=[2])


def asked(grammar: str) -> SamplingParams:
    return SamplingParams(structured_outputs=StructuredOutputsParams(grammar=grammar))


def test_a_form_that_takes_too_much_work_fails_its_request_alone(grammars: Grammars) -> None:
    forms = Forms(grammars)
    assert forms.begin(0, asked(EXPLOSIVE)).structured_outputs is None
    forms.begin(1, asked('start: "x"+'))
    forms.begin(2, SamplingParams())
    x = _token_of(grammars, "x")
    held = [forms.accept(0, x) for _ in range(LENGTH)]
    failed = next(each for each in held if each.failure)
    assert failed.failure.startswith("The output can no longer be held to its form: ")
    assert "max is 2000" in failed.failure
    assert failed.failure.endswith("for fewer tokens.")
    assert "<" not in failed.failure
    assert forms.accept(1, x) == Held()
    assert forms.accept(2, x) == forms.accept(0, None) == FREE
    forms.end(0)
    assert forms.accept(0, x) == FREE


def _token_of(grammars: Grammars, text: str) -> int:
    """The one token that a form of one word allows."""
    grammar = grammars.start(StructuredOutputsParams(choice=[text]))
    (byte,) = (i for i, byte in enumerate(grammar.mask()) if byte)
    return 8 * byte + grammar.mask()[byte].bit_length() - 1
