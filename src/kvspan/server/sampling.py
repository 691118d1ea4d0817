"""From a request's fields to `SamplingParams`. Knows names, and who wins over whom."""

from collections.abc import Mapping
from typing import Any

from kvspan.request import SamplingParams
from kvspan.server.forms import GUIDED, read_form
from kvspan.server.protocol import ChatRequest, CompletionRequest, Sampled

_FIELDS = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "stop_token_ids",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "min_tokens",
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "prompt_logprobs",
)

COMPLETION_MAX_TOKENS = 16
"""What OpenAI gives a completion that asks for no number."""


def chat_params(request: ChatRequest, defaults: Mapping[str, Any]) -> SamplingParams:
    """How the tokens of an answer are chosen.

    Args:
        request: its fields win.
        defaults: for those that it leaves out.

    Raises:
        RequestError: a value is out of its range.
    """
    _, limit = request.asked_tokens
    asked = {**defaults, **_asked(request), "max_tokens": limit}
    if request.logprobs:
        asked["logprobs"] = request.top_logprobs or 0
    return SamplingParams.from_mapping(asked)


def completion_params(request: CompletionRequest, defaults: Mapping[str, Any]) -> SamplingParams:
    """How the tokens of a completion are chosen.

    A text of 0 tokens, asked for to see the log-probabilities of a prompt, is one of 1 that is thrown
    away.

    Args:
        request: its fields win.
        defaults: for those that it leaves out.

    Raises:
        RequestError: a value is out of its range.
    """
    limit = COMPLETION_MAX_TOKENS if request.max_tokens is None else request.max_tokens
    asked = {**defaults, **_asked(request), "max_tokens": limit or 1}
    if request.logprobs is not None:
        asked["logprobs"] = request.logprobs
        if request.echo:
            asked.setdefault("prompt_logprobs", request.logprobs)
    return SamplingParams.from_mapping(asked)


def _asked(request: Sampled) -> dict[str, Any]:
    fields = {name: getattr(request, name) for name in _FIELDS}
    fields["structured_outputs"] = read_form(
        response_format=request.response_format,
        structured_outputs=request.structured_outputs,
        guided={name: getattr(request, f"guided_{name}") for name in GUIDED},
    )
    return {name: value for name, value in fields.items() if value is not None}
