"""Logits -> adjusted logits; logits -> reported log-probabilities.

Pure functions of tensors and sampling parameters. Knows no requests and no randomness. Legend: R rows,
V the vocabulary.

One order holds everywhere: the more probable token first and, of two alike, the one with the lower id.
So ties never depend on a library's sort, on the batch or on the device.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvspan.request import SamplingParams
from kvspan.step import TokenLogprob

FLOAT32_MAX = torch.finfo(torch.float32).max


def needs_adjusting(params: SamplingParams, *, num_output: int) -> bool:
    """Whether `adjusted` would change the logits of a row with `num_output` tokens of output."""
    return (
        bool(params.logit_bias)
        or num_output < params.min_tokens
        or params.repetition_penalty != 1
        or params.presence_penalty != 0
        or params.frequency_penalty != 0
    )


def adjusted(
    logits: Tensor,
    params: SamplingParams,
    *,
    prompt_ids: NDArray[np.int32],
    output_ids: NDArray[np.int32],
    eos_token_ids: Sequence[int],
) -> Tensor:
    """Applies bias, penalties and `min_tokens` to one row.

    Args:
        logits: [V] float32, as the model gave them.
        params: the row's parameters.
        prompt_ids: [n] tokens of the prompt.
        output_ids: [m] tokens of the output so far.
        eos_token_ids: tokens that end a text; not to be chosen before `min_tokens`.

    Returns:
        [V] float32.
    """
    device = logits.device
    row = logits.double()  # [V]; a copy, and wide enough for any penalty
    row[_ids(tuple(params.logit_bias), device)] += torch.tensor(
        tuple(params.logit_bias.values()), dtype=row.dtype, device=device
    )
    counts = torch.bincount(_ids(output_ids, device), minlength=len(row))  # [V]
    seen = counts > 0
    seen[_ids(prompt_ids, device)] = True
    penalty = params.repetition_penalty
    row = torch.where(seen, torch.where(row > 0, row / penalty, row * penalty), row)
    row -= params.presence_penalty * (counts > 0) + params.frequency_penalty * counts
    result = row.clamp(-FLOAT32_MAX, FLOAT32_MAX).float()
    result[logits.isneginf()] = -torch.inf  # what the model rules out stays so
    if len(output_ids) < params.min_tokens:
        result[_ids((*eos_token_ids, *params.stop_token_ids), device)] = -torch.inf
    return result


def allowed_only(logits: Tensor, allowed: bytes, *, before: Tensor, first_token: int = 0) -> Tensor:
    """Rules out every token that a row's form does not allow.

    Args:
        logits: [V] float32, adjusted; may be a part of the vocabulary.
        allowed: a bit for each token of the whole vocabulary (`step.Row.allowed`).
        before: [V] the same before they were adjusted. They count where `min_tokens` rules out all that
            the form allows: of the two the form goes first.
        first_token: the token that `logits[0]` belongs to.

    Returns:
        [V] float32; the row as it was if the form allows no token of it.
    """
    bits = np.unpackbits(np.frombuffer(allowed, dtype=np.uint8), bitorder="little")
    part = torch.from_numpy(bits[first_token : first_token + len(logits)].view(np.bool_))
    may_come = part.to(logits.device)  # [V]
    for row in (logits, before):
        kept = torch.where(may_come, row, -torch.inf)
        if bool(kept.amax().isfinite()):
            return kept
    return logits


def token_logprobs(
    logits: Tensor, tokens: Tensor, counts: Sequence[int]
) -> list[tuple[TokenLogprob, ...]]:
    """Log-probabilities to report: of a token, and of the most probable ones.

    Args:
        logits: [R, V] float32, as the model gave them.
        tokens: [R] int64; the token of each row.
        counts: how many of the most probable tokens each row lists, 0..V.

    Returns:
        For each row its token, then its `counts[row]` most probable ones in order.
    """
    order = _probability_order(logits)  # [R, V]
    own = tokens[:, None]
    own_rank = (order >= order.gather(-1, own)).sum(-1).tolist()
    listed = torch.cat([own, order.topk(max(counts, default=0)).indices], dim=-1)  # [R, 1 + most]
    values = logits.log_softmax(-1).gather(-1, listed).tolist()
    return [
        tuple(
            TokenLogprob(token, value, rank)
            for token, value, rank in zip(
                ids[: 1 + count], row[: 1 + count], (first, *range(1, 1 + count)), strict=True
            )
        )
        for ids, row, first, count in zip(listed.tolist(), values, own_rank, counts, strict=True)
    ]


def _probability_order(logits: Tensor) -> Tensor:
    """[R, V] int64, all different in a row: the greater, the more probable; ties go to the lower id.

    IEEE 754 floats of one sign are in the order of their bits, and negative ones in reverse; so with
    the other 31 bits of negative ones flipped, the bits are whole numbers in the order of the floats.
    They become the upper half of the key, the id the lower one.
    """
    bits = (logits + 0.0).view(torch.int32)  # + 0.0 makes a zero of -0.0
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    size = logits.shape[-1]
    return (ordered.long() << 32) + torch.arange(size - 1, -1, -1, device=logits.device)


def _ids(ids: Sequence[int] | NDArray[np.int32], device: torch.device) -> Tensor:
    return torch.tensor(ids, dtype=torch.int64, device=device)
