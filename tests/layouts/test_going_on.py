"""A request whose engine was lost goes on at another one with the tokens that it would have had."""

import itertools
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvspan import LLM, SamplingParams
from kvspan.engine.events import Event
from kvspan.engine.messages import Add
from kvspan.step import pack_tokens
from kvspan.testing.checkpoints import write_checkpoint, write_tokenizer
from kvspan.testing.tiny import TINY
from tests.conftest import SEED
from tests.layouts.engines import engine

NUMBERS = itertools.count()
PROMPT = [9, 40, 77, 5, 121, 33, 64, 18, 200, 90, 11]
WISHES = {
    "greedy": SamplingParams(temperature=0, max_tokens=12, ignore_eos=True),
    "drawn": SamplingParams(max_tokens=12, ignore_eos=True, logprobs=2),
    "penalties": SamplingParams(
        max_tokens=12, frequency_penalty=2, repetition_penalty=1.3, min_tokens=9
    ),
    "form": SamplingParams(max_tokens=12, structured_outputs={"regex": "[a-f]{4}-[0-9]{5}"}),
    "prompt-logprobs": SamplingParams(max_tokens=12, ignore_eos=True, prompt_logprobs=1),
}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    directory: Path = tmp_path_factory.mktemp("model")
    write_checkpoint(directory, TINY["llama-gqa"], seed=SEED)
    write_tokenizer(directory, vocab_size=203)
    layout = {"tensor_parallel_size": 2, "decode_context_parallel_size": 2}
    with engine(directory, **layout, max_num_batched_tokens=8, max_num_seqs=8) as found:
        yield found


def events(
    llm: LLM, params: SamplingParams, *, output: Sequence[int] = (), num_scored_tokens: int = 0
) -> list[Event]:
    core, found = llm.engine.core, []
    tokens = pack_tokens([*PROMPT, *output])
    order = Add(next(NUMBERS), tokens, len(PROMPT), params, seed=3, num_scored_tokens=num_scored_tokens)
    core.take(order)
    while core.has_work:
        found += core.step()
        core.check()
    return found


@pytest.mark.parametrize("params", WISHES.values(), ids=WISHES.keys())
def test_from_any_token_it_goes_on_as_it_would_have(params: SamplingParams, llm: LLM) -> None:
    whole = events(llm, params)
    sampled = [event for event in whole if event.token_id is not None]
    tokens = [event.token_id for event in sampled]
    for had in range(len(tokens)):
        rest = [e for e in events(llm, params, output=tokens[:had]) if e.token_id is not None]
        assert [e.token_id for e in rest] == tokens[had:]
        assert rest[-1].finish_reason == sampled[-1].finish_reason


def test_what_was_told_of_the_prompt_is_not_told_again(llm: LLM) -> None:
    params = WISHES["prompt-logprobs"]
    told = [entry for event in events(llm, params) for entry in event.prompt_logprobs]
    assert len(told) == len(PROMPT) - 1
    for had in range(len(told) + 1):
        rest = [e for event in events(llm, params, num_scored_tokens=had) for e in event.prompt_logprobs]
        assert [[one.token_id for one in e] for e in rest] == [
            [one.token_id for one in e] for e in told[had:]
        ]
