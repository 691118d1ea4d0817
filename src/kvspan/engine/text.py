"""Events -> outputs: tokens become text, stop strings end it, log-probabilities get their names.

Knows one output at a time. Knows no scheduler and no ranks.
"""

from collections.abc import Sequence

from kvspan.engine.events import Event
from kvspan.request import CompletionOutput, FinishReason, Logprob, SamplingParams
from kvspan.sampling.detokenize import Decoder, Detokenizer
from kvspan.sampling.stop import StopChecker
from kvspan.step import TokenLogprob


class NoText:
    """The decoder of a model without a tokenizer: there are tokens, and no text."""

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:  # noqa: ARG002
        """Nothing."""
        return ""


class OutputText:
    """One output of a request as it grows.

    Args:
        index: 0..n-1.
        decoder: of the model's tokenizer.
        params: of the request.
        prompt_ids: token ids of the prompt.
    """

    def __init__(
        self, index: int, *, decoder: Decoder, params: SamplingParams, prompt_ids: Sequence[int]
    ) -> None:
        self.index = index
        self._decoder, self._params = decoder, params
        self._detokenizer = Detokenizer(
            decoder, skip_special_tokens=params.skip_special_tokens, prompt_ids=prompt_ids
        )
        self._stop = StopChecker(params.stop, include_stop=params.include_stop_str_in_output)
        self._token_ids: list[int] = []
        self._pieces: list[str] = []
        self._logprobs: list[dict[int, Logprob]] = []
        self._cumulative = 0.0
        self._finish_reason: FinishReason | None = None
        self._stop_reason: int | str | None = None
        self._error: str | None = None

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why it ended; None = it goes on."""
        return self._finish_reason

    @property
    def end_told(self) -> FinishReason | None:
        """Why it has ended, for who is told piece by piece; None where an error comes after them."""
        by_error = self._finish_reason in (FinishReason.ERROR, FinishReason.ABORT)
        return None if by_error else self._finish_reason

    @property
    def stop_reason(self) -> int | str | None:
        """The stop string or stop token that ended it, if one did."""
        return self._stop_reason

    @property
    def logprobs(self) -> Sequence[dict[int, Logprob]]:
        """Of each token so far; empty if none were asked for."""
        return self._logprobs

    @property
    def token_ids(self) -> Sequence[int]:
        """The tokens so far."""
        return self._token_ids

    @property
    def num_tokens(self) -> int:
        """Tokens so far."""
        return len(self._token_ids)

    def push(self, event: Event) -> str:
        """Takes in what a step gave.

        Returns:
            The text that is certain since then: it can no longer become a stop string or half a
            character. All such pieces, joined, are the output's text.
        """
        if event.failure:
            return self._fail(event)
        if event.token_id is None:
            return ""
        self._token_ids.append(event.token_id)
        if event.logprobs:
            self._logprobs.append(named_logprobs(event.logprobs, self._decoder))
            self._cumulative += event.logprobs[0].logprob
        piece = self._text_of(event, event.token_id)
        self._pieces.append(piece)
        return piece

    def abort(self) -> None:
        """Ends it from outside."""
        self._finish_reason = self._finish_reason or FinishReason.ABORT

    def output(self) -> CompletionOutput:
        """The output so far."""
        asked = self._params.logprobs is not None
        return CompletionOutput(
            index=self.index,
            text="".join(self._pieces),
            token_ids=tuple(self._token_ids),
            cumulative_logprob=self._cumulative if asked else None,
            logprobs=tuple(self._logprobs) if asked else None,
            finish_reason=self._finish_reason,
            stop_reason=self._stop_reason,
            error=self._error,
        )

    def _fail(self, event: Event) -> str:
        """Ends with what there is; a token that came with the failure is none of it."""
        self._finish_reason, self._error = event.finish_reason, event.failure
        held = self._stop.push(self._detokenizer.flush(), may_stop=False).text + self._stop.flush()
        self._pieces.append(held)
        return held

    def _text_of(self, event: Event, token_id: int) -> str:
        # A token that ends the output is a mark and no text, unless stops are asked to be seen.
        is_mark = event.finish_reason is FinishReason.STOP and not event.form_ended
        silent = is_mark and not self._params.include_stop_str_in_output
        text = "" if silent else self._detokenizer.push(token_id)
        if event.finish_reason is not None:
            text += self._detokenizer.flush()
        may_stop = len(self._token_ids) >= self._params.min_tokens
        released = self._stop.push(text, may_stop=may_stop)
        if released.stop is not None:
            self._finish_reason, self._stop_reason = FinishReason.STOP, released.stop
            return released.text
        if event.finish_reason is None:
            return released.text
        self._finish_reason, self._stop_reason = event.finish_reason, event.stop_token
        return released.text + self._stop.flush()


def named_logprobs(logprobs: Sequence[TokenLogprob], decoder: Decoder) -> dict[int, Logprob]:
    """Token id -> log-probability with the token's text.

    Args:
        logprobs: the token's own first, then the most probable ones; it may be among those again.
        decoder: of the model's tokenizer.
    """
    return {
        each.token_id: Logprob(
            logprob=each.logprob,
            rank=each.rank,
            decoded_token=decoder.decode([each.token_id], skip_special_tokens=False),
        )
        for each in logprobs
    }
