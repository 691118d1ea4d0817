"""What a user asks for and gets: SamplingParams, outputs, reasons to finish.

Knows every limit of a sampling parameter. Knows no tensors, no tokenizer and no model but the size of
its vocabulary.
"""

import difflib
import math
import operator
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from enum import StrEnum
from numbers import Real
from typing import Any

import msgspec

from kvspan.errors import RequestError, blaming
from kvspan.structured import StructuredOutputsParams
from kvspan.unicode import check_unicode

WHOLE_VOCABULARY = -1
"""In `logprobs` and `prompt_logprobs`: every token's, as vLLM spells it."""

_MAX_OUTPUTS = 16384  # of one prompt: each is a request of its own to the engine
_MIN_INT64, _MAX_INT64 = -(2**63), 2**63 - 1  # what a message between processes can carry


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"
    """An end-of-text token, a stop string or a stop token."""
    LENGTH = "length"
    """`max_tokens` or `max_model_len` was reached."""
    ABORT = "abort"
    """Somebody cancelled it."""
    ERROR = "error"
    """It cannot go on: its form cannot be held to any longer, or its logits are no numbers."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How the tokens of a request are chosen; the names are those of the field.

    Args:
        n: outputs for each prompt.
        temperature: 0 takes the most probable token, as `top_k=1` does.
        top_k: tokens to choose among, the most probable ones; 0 or -1 = all.
        top_p: choose among the most probable tokens that together have this probability; (0, 1].
        min_p: leave out tokens less probable than this times the most probable one; [0, 1].
        seed: fixes the random stream of the request whatever runs beside it; None = from the
            engine's seed.
        presence_penalty: taken off the logit of a token that the output has; [-2, 2].
        frequency_penalty: the same for each time that it has it; [-2, 2].
        repetition_penalty: divides positive logits (multiplies negative ones) of tokens that the
            prompt or the output has; over 0.
        logit_bias: added to the logits, by token id; [-100, 100] each.
        max_tokens: tokens of output at the most; None = as many as there is room for.
        min_tokens: no end of text and no stop before this many tokens.
        stop: a string or several that end the output; they are left out of the text. A tuple once
            the struct is made.
        stop_token_ids: tokens that end the output. A tuple once the struct is made.
        ignore_eos: go on after an end-of-text token.
        include_stop_str_in_output: keep the stop string in the text.
        skip_special_tokens: leave special tokens out of the text.
        logprobs: log-probabilities of this many most probable tokens at each position, besides the
            sampled one's; -1 = of the whole vocabulary, None = none.
        prompt_logprobs: the same for the prompt's tokens.
        structured_outputs: a form that the output is held to; None = free text.

    Raises:
        RequestError: a value is out of its range or of the wrong kind.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    structured_outputs: StructuredOutputsParams | None = None

    def __post_init__(self) -> None:
        # Each rule also returns the value in plain Python, since a numpy scalar out of somebody's
        # sweep could not be sent to a worker.
        for name, value in msgspec.structs.asdict(self).items():
            with blaming(name):
                msgspec.structs.force_setattr(self, name, _RULES[name](name, value))
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens {self.min_tokens} is more than max_tokens {self.max_tokens}; "
                "raise max_tokens or lower min_tokens.",
                param="min_tokens",
            )

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> "SamplingParams":
        """The parameters that a JSON object asks for.

        Args:
            mapping: parameter name -> value. Ids in `logit_bias` may be strings, as JSON's keys are,
                and null asks for the default (of `max_tokens`: as many as there is room for).

        Raises:
            RequestError: a name is unknown, or a value is out of its range or of the wrong kind.
        """
        for name in mapping:
            if name not in _RULES:
                raise RequestError(_unknown_name(name), param=name)
        asked = {k: v for k, v in mapping.items() if v is not None or k == "max_tokens"}
        if isinstance(bias := asked.get("logit_bias"), Mapping):
            asked["logit_bias"] = {_key_as_id(key): value for key, value in bias.items()}
        return cls(**asked)

    @property
    def is_greedy(self) -> bool:
        """Whether the most probable token is always taken."""
        return self.temperature == 0 or self.top_k == 1

    def validate(self, vocab_size: int, *, eos_token_ids: Collection[int] = ()) -> None:
        """Checks what depends on the model.

        Args:
            vocab_size: tokens that have a logit.
            eos_token_ids: tokens that end a text.

        Raises:
            RequestError: a token id is not in the vocabulary, more log-probabilities are asked for
                than there are tokens, or `min_tokens` leaves no token to choose.
        """
        for name, ids in (("logit_bias", self.logit_bias), ("stop_token_ids", self.stop_token_ids)):
            if (outside := max(ids, default=0)) >= vocab_size:
                raise RequestError(
                    f"{name} has token id {outside}, which is not in the vocabulary: ids are "
                    f"0 to {vocab_size - 1}.",
                    param=name,
                )
        for name, count in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if (count or 0) > vocab_size:
                raise RequestError(
                    f"{name} {count} is more than the {vocab_size} tokens of the vocabulary; -1 asks "
                    "for all of them.",
                    param=name,
                )
        if self.min_tokens and len({*self.stop_token_ids, *eos_token_ids}) >= vocab_size:
            raise RequestError(
                f"min_tokens {self.min_tokens} leaves no token to choose: all {vocab_size} of the "
                "vocabulary end the output; take some out of stop_token_ids.",
                param="min_tokens",
            )


class Logprob(msgspec.Struct, frozen=True, kw_only=True):
    """How probable the model found a token.

    Args:
        logprob: natural log, before temperature and penalties; may be -inf.
        rank: place in the vocabulary by probability, the most probable being 1.
        decoded_token: the token's text; None if nobody decoded it.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


class CompletionOutput(msgspec.Struct, frozen=True, kw_only=True):
    """One of the `n` outputs of a prompt.

    Args:
        index: 0..n-1.
        text: decoded `token_ids`, without what a stop string cut off.
        token_ids: the sampled tokens.
        cumulative_logprob: sum of their log-probabilities (natural log); None if none were asked for.
        logprobs: for each sampled token, token id -> log-probability: its own and those of the most
            probable tokens; None if none were asked for.
        finish_reason: why it ended; None while it runs.
        stop_reason: the stop string or stop token that ended it; None for an end-of-text token and
            for any other reason.
        error: a sentence, if it ended with FinishReason.ERROR.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    cumulative_logprob: float | None = None
    logprobs: tuple[dict[int, Logprob], ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None


class RequestOutput(msgspec.Struct, frozen=True, kw_only=True):
    """What a prompt gave, so far or in all.

    Args:
        request_id: the caller's name for it.
        prompt: its text; None if it came as token ids.
        prompt_token_ids: its tokens.
        prompt_logprobs: for each of its tokens, token id -> log-probability, None for the first, which
            nothing predicts; None if none were asked for.
        outputs: `n` of them, in order of their index.
        finished: whether all outputs have ended.
        num_cached_tokens: tokens of the prompt whose keys were found in the cache.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    finished: bool
    prompt_logprobs: tuple[dict[int, Logprob] | None, ...] | None = None
    num_cached_tokens: int = 0


Rule = Callable[[str, Any], Any]
"""(parameter's name, value) -> the value in plain Python, or RequestError."""


def _whole(low: int, high: int = _MAX_INT64, *, optional: bool = False) -> Rule:
    """A whole number in [low, high]; None too if `optional`."""
    open_end, any_int64 = high == _MAX_INT64, low == _MIN_INT64
    limits = f"of at least {low}" if open_end else f"in [{low}, {high}]"
    wanted = "a whole number " + ("of 64 bits" if any_int64 else limits)

    def rule(name: str, value: Any) -> int | None:
        if optional and value is None:
            return None
        number = _index(value)
        if number is None or not low <= number <= high:
            over = open_end and not any_int64 and number is not None and number > high
            bound = f"a whole number of at most {high}" if over else wanted
            raise RequestError(f"{name} must be {bound}, got {_shown(value)}.")
        return number

    return rule


def _number(low: float, high: float = sys.float_info.max, *, over: bool = False) -> Rule:
    """A finite number in [low, high], or in (low, high] if `over`."""
    end = "inf)" if high == sys.float_info.max else f"{high:g}]"
    wanted = f"in {'(' if over else '['}{low:g}, {end}"

    def rule(name: str, value: Any) -> float:
        number = _float(value)  # NaN fails every comparison, and infinity is more than `high`
        if number is None or not low <= number <= high or (over and number == low):
            raise RequestError(f"{name} must be a number {wanted}, got {_shown(value)}.")
        return number

    return rule


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise RequestError(f"{name} must be true or false, got {_shown(value)}.")
    return value


def _strings(name: str, value: Any) -> tuple[str, ...]:
    strings = _several(name, [value] if isinstance(value, str) else value, "strings")
    for string in strings:
        if not isinstance(string, str) or not string:
            raise RequestError(f"{name} must be strings that are not empty, got {_shown(string)}.")
        check_unicode(name, string)
    return strings


def _token_ids(name: str, value: Any) -> tuple[int, ...]:
    return tuple(_token_id(name, token) for token in _several(name, value, "token ids"))


def _bias(name: str, value: Any) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise RequestError(f"{name} must map token ids to numbers, got {_shown(value)}.")
    number = _number(-100, 100)
    return {_token_id(name, token): number(f"{name}[{token}]", bias) for token, bias in value.items()}


def _form(name: str, value: Any) -> StructuredOutputsParams | None:  # noqa: ARG001
    if value is None or isinstance(value, StructuredOutputsParams):
        return value
    return StructuredOutputsParams.from_mapping(value)


_RULES: dict[str, Rule] = {
    "n": _whole(1, _MAX_OUTPUTS),
    "temperature": _number(0),
    "top_k": _whole(-1),
    "top_p": _number(0, 1, over=True),
    "min_p": _number(0, 1),
    "seed": _whole(_MIN_INT64, optional=True),
    "presence_penalty": _number(-2, 2),
    "frequency_penalty": _number(-2, 2),
    "repetition_penalty": _number(0, over=True),
    "logit_bias": _bias,
    "max_tokens": _whole(1, optional=True),
    "min_tokens": _whole(0),
    "stop": _strings,
    "stop_token_ids": _token_ids,
    "ignore_eos": _flag,
    "include_stop_str_in_output": _flag,
    "skip_special_tokens": _flag,
    "logprobs": _whole(WHOLE_VOCABULARY, optional=True),
    "prompt_logprobs": _whole(WHOLE_VOCABULARY, optional=True),
    "structured_outputs": _form,
}

_USE_INSTEAD = {
    "best_of": "ask for n outputs and choose among them",
    "use_beam_search": "there is no beam search; ask for n outputs",
    "bad_words": "bias their tokens with logit_bias -100",
    "allowed_token_ids": "raise them with logit_bias",
    "guided_decoding": "use structured_outputs",
    "logits_processors": "use logit_bias and the penalties",
    "truncate_prompt_tokens": "cut the prompt before it is sent",
}


def _unknown_name(name: str) -> str:
    """The sentence for a parameter that does not exist."""
    if name in _USE_INSTEAD:
        return f'The sampling parameter "{name}" is not supported: {_USE_INSTEAD[name]}.'
    close = difflib.get_close_matches(name, _RULES, n=2)
    hint = f"did you mean {' or '.join(close)}?" if close else f"there are {', '.join(_RULES)}."
    return f'There is no sampling parameter "{name}"; {hint}'


def _several(name: str, value: Any, what: str) -> tuple[Any, ...]:
    # A set has no order that two processes agree on; a mapping or a string is surely a mistake.
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
        raise RequestError(f"{name} must be a list of {what}, got {_shown(value)}.")
    return tuple(value)


def _token_id(name: str, value: Any) -> int:
    token = _index(value)
    if token is None or not 0 <= token <= _MAX_INT64:
        raise RequestError(f"{name} has {_shown(value)}, which is not a token id.")
    return token


def _key_as_id(key: Any) -> Any:
    """A JSON object's key as the whole number it spells, else as it is."""
    return int(key) if isinstance(key, str) and key.isdecimal() and len(key) < 20 else key


def _index(value: Any) -> int | None:
    """A whole number of any library as an int; True and 1.0 are none."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def _float(value: Any) -> float | None:
    """A number of any library as a float; True is none, and what is too large is infinity."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _shown(value: Any) -> str:
    """`value` as Python spells it, cut so that a message stays a sentence."""
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
