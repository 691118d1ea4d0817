"""What a user asks for and gets: SamplingParams, outputs, reasons to finish. Knows no tensors."""

from enum import StrEnum

import msgspec


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"
    """An end-of-text token, a stop string or a stop token."""
    LENGTH = "length"
    """`max_tokens` or `max_model_len` was reached."""
    ABORT = "abort"
    """Somebody cancelled it."""


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
        stop: strings that end the output; they are left out of the text.
        stop_token_ids: tokens that end the output.
        ignore_eos: go on after an end-of-text token.
        include_stop_str_in_output: keep the stop string in the text.
        skip_special_tokens: leave special tokens out of the text.
        logprobs: log-probabilities of this many most probable tokens at each position, besides the
            sampled one's; None = none.
        prompt_logprobs: the same for the prompt's tokens.
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
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
