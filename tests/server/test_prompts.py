"""Prompts on their way to the engine: what takes long is done beside the event loop."""

import asyncio
import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
from fastapi import Request

from kvspan.errors import RequestError
from kvspan.loading.tokenizer import Tokenizer
from kvspan.request import SamplingParams
from kvspan.server.prompts import decode_all, encode, encode_all
from kvspan.server.protocol import CompletionRequest
from kvspan.server.routes.completions import text_completions


class Watched:
    """A tokenizer, and the library of forms, which say in which thread they were at work."""

    def __init__(self) -> None:
        self.threads: set[int] = set()

    @property
    def was_beside(self) -> bool:
        """Whether this thread, which has the event loop, did nothing."""
        return threading.get_ident() not in self.threads

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        self.threads.add(threading.get_ident())
        return [len(text)]

    def decode(self, ids: Sequence[int]) -> str:
        self.threads.add(threading.get_ident())
        return "x" * len(ids)

    def check_form(self, _: SamplingParams) -> None:
        self.threads.add(threading.get_ident())
        raise RequestError("There is no such form.")


@pytest.mark.parametrize(("texts", "beside"), [(["ab", "c"], False), (["a" * 3_000] * 10, True)])
def test_texts_that_are_long_together_are_cut_beside_the_event_loop(
    texts: list[str], beside: bool
) -> None:
    watched = Watched()
    found = asyncio.run(encode_all(cast(Tokenizer, watched), texts))
    assert found == [[len(text)] for text in texts]
    assert watched.was_beside == beside


def test_what_is_echoed_of_many_tokens_is_made_beside_it_too() -> None:
    watched = Watched()
    found = asyncio.run(decode_all(cast(Tokenizer, watched), [[1] * 15_000, [2] * 10_000]))
    assert [len(text) for text in found] == [15_000, 10_000]
    assert watched.was_beside


def test_half_a_surrogate_pair_is_refused_wherever_it_stands() -> None:
    with pytest.raises(RequestError, match="no Unicode"):
        asyncio.run(encode_all(cast(Tokenizer, Watched()), ["a", "\ud800"]))
    with pytest.raises(RequestError, match="no Unicode"):
        asyncio.run(encode(cast(Tokenizer, Watched()), "\ud800"))


def test_a_form_of_a_completion_is_made_beside_it() -> None:
    watched = Watched()
    here = SimpleNamespace(model_name=str, default_sampling={}, llm=watched)
    state: Any = SimpleNamespace(app=SimpleNamespace(state=SimpleNamespace(served=here)))
    body = CompletionRequest(prompt=[1], guided_regex="a")
    with pytest.raises(RequestError, match="no such form") as refused:
        asyncio.run(text_completions(body, cast(Request, state)))
    assert refused.value.param == "guided_regex"
    assert watched.was_beside
