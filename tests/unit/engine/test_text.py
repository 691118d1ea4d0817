"""What is told of an output's end, piece by piece."""

import pytest

from kvspan.engine.events import Event
from kvspan.engine.text import NoText, OutputText
from kvspan.request import FinishReason, SamplingParams


def event(token_id: int | None, finish_reason: FinishReason | None = None, failure: str = "") -> Event:
    return Event(0, token_id, (), (), finish_reason, None, 0, 0, failure=failure)


def output() -> OutputText:
    return OutputText(0, decoder=NoText(), params=SamplingParams(), prompt_ids=(1, 2))


def test_an_end_is_told() -> None:
    text = output()
    text.push(event(7))
    assert text.end_told is None
    text.push(event(8, FinishReason.LENGTH))
    assert text.end_told is FinishReason.LENGTH


@pytest.mark.parametrize("how", ["failed", "aborted"])
def test_a_piece_that_waits_while_its_request_fails_tells_no_end(how: str) -> None:
    """The piece is told first, and then the error."""
    text = output()
    text.push(event(7))
    if how == "failed":
        text.push(event(None, FinishReason.ERROR, "Its logits are no numbers."))
    else:
        text.abort()
    assert text.finish_reason is not None
    assert text.end_told is None
