"""Refusals of requests that can never run, before anything is queued. Pure; knows no engine."""

from collections.abc import Sequence

from kvspan.config.resolved import Resolved
from kvspan.errors import LengthError, RequestError
from kvspan.request import SamplingParams


def check_request(resolved: Resolved, prompt: Sequence[int], params: SamplingParams) -> None:
    """Refuses a request that can never run.

    Args:
        resolved: of the engine that is to run it.
        prompt: its token ids.
        params: how its tokens are chosen.

    Raises:
        RequestError: one sentence with the numbers.
    """
    config = resolved.model_config
    check_length(resolved, len(prompt))
    if min(prompt) < 0 or max(prompt) >= config.vocab_size:
        outside = next(t for t in prompt if not 0 <= t < config.vocab_size)
        vocabulary = f"the vocabulary has 0 to {config.vocab_size - 1}"
        raise RequestError(f"The prompt has the token id {outside}; {vocabulary}.", param="prompt")
    params.validate(config.vocab_size, eos_token_ids=config.eos_token_ids)
    _check_logprobs(resolved.max_logprobs, params)


def _check_logprobs(limit: int, params: SamplingParams) -> None:
    """A few thousand prompt positions times a whole vocabulary are more than memory holds."""
    for name, count in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
        if count is None or limit < 0 or 0 <= count <= limit:
            continue
        asked = "all tokens" if count < 0 else count
        raise RequestError(
            f"{name} asks for {asked} at each position, and --max-logprobs is {limit}: ask for fewer, "
            "or raise it (-1 is no limit).",
            param=name,
        )


def check_length(resolved: Resolved, num_tokens: int) -> None:
    """Refuses a prompt of a length that can never run.

    Args:
        resolved: of the engine that is to run it.
        num_tokens: of the prompt.

    Raises:
        RequestError: one sentence with the numbers.
    """
    limit = resolved.max_model_len
    if not num_tokens:
        raise RequestError("The prompt is empty: it needs at least one token.", param="prompt")
    if num_tokens >= limit:
        raise LengthError(
            f"The prompt has {num_tokens} tokens, which leaves no room for output: "
            f"--max-model-len is {limit}, prompt and output together.",
            param="prompt",
        )
