"""Logits -> tokens. Knows the rows of a step. Knows no cache and no text.

The order of the steps is vLLM's: log-probabilities are reported of the model's own logits; then bias,
penalties and `min_tokens`, then temperature, `min_p`, `top_k` and `top_p`, then the draw.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvspan.errors import OutputError
from kvspan.layers.best import Best, best
from kvspan.layers.logits import Logits
from kvspan.request import WHOLE_VOCABULARY, SamplingParams
from kvspan.sampling.draw import draw
from kvspan.sampling.logits import adjusted, allowed_only, needs_adjusting, token_logprobs
from kvspan.step import Sampled, TokenLogprob


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRow:
    """A row that samples one token.

    Args:
        request_id: whose it is.
        params: how to choose.
        seed: of the request's random stream.
        position: place in the sequence of the token to be sampled; the first of an output has the
            prompt's length.
        prompt_ids: [n] int32, tokens of the prompt.
        output_ids: [m] int32, tokens of the output so far.
        eos_token_ids: tokens that end a text.
        allowed: a bit for each token of the vocabulary (`step.Row.allowed`); empty = all.
    """

    request_id: int
    params: SamplingParams
    seed: int
    position: int
    prompt_ids: NDArray[np.int32]
    output_ids: NDArray[np.int32]
    eos_token_ids: Sequence[int]
    allowed: bytes = b""

    @property
    def is_plain(self) -> bool:
        """Whether its token is chosen from the model's own logits, and nothing else is asked."""
        params = self.params
        return (
            params.logprobs is None
            and not self.allowed
            and not needs_adjusting(params, num_output=len(self.output_ids))
        )


class Sampler:
    """Chooses tokens. Keeps nothing between calls: a row's token follows from the row alone."""

    def sample(self, logits: Tensor, rows: Sequence[SamplingRow]) -> list[Sampled]:
        """Chooses one token for each row.

        Args:
            logits: [R, V] float32; left as they are.
            rows: R of them, in the same order.

        Returns:
            One `Sampled` a row, in order, with log-probabilities if the row asks for them. A row whose
            logits have a NaN or +inf, or leave no token to choose, has a `failure` instead of a token.
        """
        adjusted_logits = _adjust(logits, rows)
        failures = _unusable(
            logits, lambda i: f"request {rows[i].request_id}, position {rows[i].position}"
        )
        if adjusted_logits is not logits:
            after = _unusable(
                adjusted_logits,
                lambda i: f"request {rows[i].request_id} after min_tokens and logit_bias",
            )
            failures = after | failures
        if failures:
            return self._sample_others(logits, rows, failures)
        shared = Logits.of_one(adjusted_logits)
        tokens = _choose(shared, shared.best(), rows)
        reports = _reports(logits, tokens, rows)
        return [
            Sampled(row.request_id, token, report)
            for row, token, report in zip(rows, tokens.tolist(), reports, strict=True)
        ]

    @staticmethod
    def plain(logits: Logits, best: Best, rows: Sequence[SamplingRow]) -> Tensor:
        """Tokens of rows that are plain (`SamplingRow.is_plain`), as `sample` has them. A collective.

        Args:
            logits: of the rows, shared out.
            best: the most probable token of each row; its logit is finite.
            rows: in the same order.

        Returns:
            [R] int64.
        """
        return _choose(logits, best, rows)

    def prompt_logprobs(
        self, logits: Tensor, targets: Sequence[int] | NDArray[np.int32], count: int
    ) -> list[tuple[TokenLogprob, ...]]:
        """Log-probabilities of prompt tokens.

        Args:
            logits: [n, V] float32; row i predicts `targets[i]`.
            targets: [n] the prompt's tokens.
            count: most probable tokens to list besides; -1 = the whole vocabulary.

        Returns:
            For each target its own, then the `count` most probable ones in order.

        Raises:
            OutputError: a row's logits have a NaN or +inf, or only -inf.
        """
        for failure in _unusable(logits, lambda i: f"the prompt's token {int(targets[i])}").values():
            raise OutputError(failure)
        tokens = torch.tensor(targets, dtype=torch.int64, device=logits.device)
        return token_logprobs(logits, tokens, [_num_listed(count, logits)] * len(tokens))

    def _sample_others(
        self, logits: Tensor, rows: Sequence[SamplingRow], failures: Mapping[int, str]
    ) -> list[Sampled]:
        """The tokens of all rows but those that have failed."""
        others = [i for i in range(len(rows)) if i not in failures]
        sampled = dict(zip(others, self.sample(logits[others], [rows[i] for i in others]), strict=True))
        return [
            sampled.get(i) or Sampled(row.request_id, None, failure=failures[i])
            for i, row in enumerate(rows)
        ]


def uniform(seed: int, position: int) -> float:
    """The number in [0, 1) that decides the token at `position`.

    A hash and not a generator: a generator's state would have to be saved, moved and restored with the
    request, and would advance with whatever shares its batch. This one is the same in any batch, on any
    rank, after a preemption and after a restart.

    Args:
        seed: of the request's random stream.
        position: of the token in its sequence.
    """
    counter = seed.to_bytes(16, "little", signed=True) + position.to_bytes(8, "little")
    digest = hashlib.blake2b(counter, digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53  # 53 bits: exact in a float64


def _adjust(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """[R, V]: logits with bias, penalties, `min_tokens` and forms; the same tensor if none has any."""
    wishes = [needs_adjusting(row.params, num_output=len(row.output_ids)) for row in rows]
    changed = [i for i, row in enumerate(rows) if wishes[i] or row.allowed]
    if not changed:
        return logits
    result = logits.clone()
    for i in changed:
        row = rows[i]
        if wishes[i]:
            result[i] = adjusted(
                logits[i],
                row.params,
                prompt_ids=row.prompt_ids,
                output_ids=row.output_ids,
                eos_token_ids=row.eos_token_ids,
            )
        if row.allowed:
            result[i] = allowed_only(result[i], row.allowed, before=logits[i])
    return result


def _choose(logits: Logits, best: Best, rows: Sequence[SamplingRow]) -> Tensor:
    """[R] int64: the most probable token of greedy rows, a drawn one of the others."""
    tokens = best.tokens.clone()
    drawn = [i for i, row in enumerate(rows) if not row.params.is_greedy]
    if drawn:
        tokens[drawn] = draw(
            logits.of_rows(drawn),
            best.values[drawn],
            [rows[i].params for i in drawn],
            [uniform(rows[i].seed, rows[i].position) for i in drawn],
        )
    return tokens


def _reports(
    logits: Tensor, tokens: Tensor, rows: Sequence[SamplingRow]
) -> list[tuple[TokenLogprob, ...]]:
    """Each row's log-probabilities, empty for a row that asks for none."""
    counts = {i: row.params.logprobs for i, row in enumerate(rows) if row.params.logprobs is not None}
    if not counts:
        return [()] * len(rows)
    asked = list(counts)
    listed = [_num_listed(count, logits) for count in counts.values()]
    found = dict(zip(asked, token_logprobs(logits[asked], tokens[asked], listed), strict=True))
    return [found.get(i, ()) for i in range(len(rows))]


def _num_listed(count: int, logits: Tensor) -> int:
    """Most probable tokens that `count` asks for."""
    return logits.shape[-1] if count == WHOLE_VOCABULARY else min(count, logits.shape[-1])


def _unusable(logits: Tensor, name: Callable[[int], str]) -> dict[int, str]:
    """Row -> a sentence, for those without a finite maximum: they have a NaN or +inf, or only -inf."""
    usable = best(logits).values.isfinite()
    if bool(usable.all()):
        return {}
    return {row: _complaint(logits[row], name(row)) for row in (~usable).nonzero()[:, 0].tolist()}


def _complaint(logits: Tensor, name: str) -> str:
    nans, infs = int(logits.isnan().sum()), int(logits.isinf().sum())
    return (
        f"No token can be chosen for {name}: of {len(logits)} logits {nans} are NaN and {infs} "
        "infinite. Weights may be damaged, or --dtype too narrow; try --dtype float32."
    )
