"""A request as its user sees it: one prompt, n outputs, and what each step adds to them.

Knows text, tokens and their names. Knows no engine, no process and no threads.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral

from kvspan.engine.events import Event
from kvspan.engine.text import OutputText, named_logprobs
from kvspan.errors import RequestError, blaming
from kvspan.loading.tokenizer import Tokenizer
from kvspan.request import Logprob, RequestOutput, SamplingParams
from kvspan.sampling.detokenize import Decoder
from kvspan.unicode import check_unicode

Prompt = str | Sequence[int] | Mapping[str, str | Sequence[int]]
"""Text, token ids, or a mapping with one of `prompt` and `prompt_token_ids`."""


@dataclass(slots=True, kw_only=True)
class Generation:
    """A request as the user sees it: one prompt, n outputs.

    Args:
        request_id: the caller's name for it.
        prompt: its text; None if it came as token ids.
        prompt_ids: its token ids.
        params: how tokens are chosen.
        outputs: by the engine's number, in order of their index.
        prompt_logprobs: of the prompt's tokens, as far as they have come.
        num_cached_tokens: tokens of the prompt that were found in the cache.
        num_computed_tokens: tokens of prompt and first output that are in the cache by now.
        listener: gets every piece of this request, whoever runs the step that makes it.
    """

    request_id: str
    prompt: str | None
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    outputs: dict[int, OutputText] = field(default_factory=dict)
    prompt_logprobs: list[dict[int, Logprob] | None] = field(default_factory=lambda: [None])
    num_cached_tokens: int = 0
    num_computed_tokens: int = 0
    listener: deque["Piece"] | None = None

    @property
    def finished(self) -> bool:
        """Whether all outputs have ended."""
        return all(output.finish_reason is not None for output in self.outputs.values())

    @property
    def num_tokens(self) -> int:
        """Tokens of all outputs so far."""
        return sum(output.num_tokens for output in self.outputs.values())

    @property
    def first(self) -> OutputText:
        """The output of index 0."""
        return next(iter(self.outputs.values()))

    def take(self, event: Event, decoder: Decoder) -> "Piece":
        """Takes in what a step gave one of its outputs.

        Args:
            event: from the engine.
            decoder: of the model's tokenizer.
        """
        output = self.outputs[event.request_id]
        if output is self.first:
            self.num_computed_tokens = event.num_computed_tokens
            named = (named_logprobs(each, decoder) for each in event.prompt_logprobs)
            self.prompt_logprobs.extend(named)
            self.num_cached_tokens = event.num_cached_tokens
        return Piece(self, output.index, output.push(event), event.token_id)

    def abort(self) -> None:
        """Ends it from outside."""
        for output in self.outputs.values():
            output.abort()

    def result(self) -> RequestOutput:
        """What it gave so far."""
        asked = self.params.prompt_logprobs is not None
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_ids,
            outputs=tuple(output.output() for output in self.outputs.values()),
            finished=self.finished,
            prompt_logprobs=tuple(self.prompt_logprobs) if asked else None,
            num_cached_tokens=self.num_cached_tokens,
        )


@dataclass(frozen=True, slots=True)
class Piece:
    """What a step added to one output.

    Args:
        generation: whose output it is.
        index: which of the n.
        text: the text that became certain; joined, the pieces are the output's text.
        token_id: the sampled token; None while the prompt is being computed.
    """

    generation: Generation
    index: int
    text: str
    token_id: int | None


def read_prompt(
    prompt: Prompt, params: SamplingParams, tokenizer: Tokenizer | None
) -> tuple[str | None, list[int]]:
    """A prompt's text, if it is text, and its token ids.

    Args:
        prompt: as the user gave it.
        params: what goes with it.
        tokenizer: of the model; None = there is none.

    Raises:
        RequestError: it is neither text nor token ids, or needs a tokenizer that is not there.
    """
    if params.stop and tokenizer is None:
        raise RequestError(
            "Stop strings need a tokenizer, and this model has none; use stop_token_ids.", param="stop"
        )
    with blaming("prompt"):
        return _read(prompt, tokenizer)


def _read(prompt: Prompt, tokenizer: Tokenizer | None) -> tuple[str | None, list[int]]:
    if isinstance(prompt, Mapping):
        if len(prompt) != 1 or not prompt.keys() <= {"prompt", "prompt_token_ids"}:
            raise RequestError(
                'A prompt given as a mapping has one key, "prompt" or "prompt_token_ids"; '
                f"got {sorted(map(str, prompt))}."
            )
        (prompt,) = prompt.values()
    if not isinstance(prompt, str):
        return None, _token_ids(prompt)
    if tokenizer is None:
        raise RequestError(
            "This model has no tokenizer: give the prompt as token ids, or name one with --tokenizer."
        )
    return prompt, tokenizer.encode(check_unicode("The prompt", prompt))


def _token_ids(prompt: object) -> list[int]:
    """Token ids as plain numbers; whatever else comes from outside is refused."""
    if not isinstance(prompt, Sequence) or isinstance(prompt, (str, bytes)):
        raise RequestError(f"A prompt is text or a list of token ids, not {type(prompt).__name__}.")
    if set(map(type, prompt)) == {int}:  # as the rest finds out in twenty times the time
        return list(prompt)
    for token in prompt:
        if isinstance(token, bool) or not isinstance(token, Integral):
            raise RequestError(f"A prompt of token ids has {token!r}, which is not a whole number.")
    return [int(token) for token in prompt]
