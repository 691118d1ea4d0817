"""Hidden states -> what a step gives: sampled tokens and log-probabilities.

Every rank makes its part of the logits, in the same number of pieces, and helps to draw from it; rank 0
alone reports.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvspan.attention.prefill import row_numbers
from kvspan.comm.group import Group
from kvspan.errors import OutputError
from kvspan.layers.rows import gather_rows, some_rows
from kvspan.models.base import Model
from kvspan.sampling.sampler import Sampler, SamplingRow
from kvspan.step import Row, Sampled, TokenLogprob
from kvspan.worker.batch import Mirrors, RequestMirror
from kvspan.worker.share import Shares
from kvspan.worker.watch import Recorder

LOGIT_ROWS = 256
"""Rows whose logits are made at once: bounds the memory of prompt log-probabilities."""


@dataclass(frozen=True, slots=True)
class _Scored:
    """Log-probabilities of some of a prompt's tokens, or why there are none."""

    entries: tuple[tuple[TokenLogprob, ...], ...] = ()
    failure: str = ""


class Outputs:
    """Turns a step's hidden states into its result.

    Args:
        model: makes logits of hidden states, a collective.
        sampler: chooses tokens.
        eos_token_ids: tokens that end a text.
        is_speaker: whether this rank reports; the others only help to make logits.
        sees_logits: whether it helps: one PCP coordinate does, which the speaker is of.
        recorder: notes the time that logits take.
    """

    def __init__(
        self,
        model: Model,
        sampler: Sampler,
        *,
        eos_token_ids: Sequence[int],
        is_speaker: bool,
        sees_logits: bool,
        recorder: Recorder,
    ) -> None:
        self._model, self._sampler, self._recorder = model, sampler, recorder
        self._eos_token_ids = eos_token_ids
        self._is_speaker, self._sees_logits = is_speaker, sees_logits

    @staticmethod
    def wanted(rows: Sequence[Row], mirrors: Mirrors) -> NDArray[np.bool_]:
        """[R], of which rows of the step the hidden states are looked at."""
        ends = np.cumsum([row.num_tokens for row in rows])
        wanted = np.zeros(ends[-1], np.bool_)
        for row, end in zip(rows, ends, strict=True):
            wanted[end - 1] = row.sample
            if mirrors[row.request_id].params.prompt_logprobs is not None:
                wanted[end - row.num_tokens : end] = True
        return wanted

    def of(self, rows: Sequence[Row], mirrors: Mirrors, hidden: Tensor) -> tuple[Sampled, ...]:
        """One entry a row on the speaker, nothing elsewhere.

        Args:
            rows: the step's rows.
            mirrors: what is known of their requests.
            hidden: [R, hidden_size], the final hidden states, of those rows at least that are `wanted`.
        """
        if not self._sees_logits:
            return ()
        starts = np.cumsum([0, *(row.num_tokens for row in rows)])
        prompts = [
            self._prompt(row, mirrors[row.request_id], hidden[a:])
            for row, a in zip(rows, starts[:-1], strict=True)
        ]
        sampling = [i for i, row in enumerate(rows) if row.sample]
        sampled: dict[int, Sampled] = {}
        if sampling:
            ends = row_numbers(starts[1:][sampling] - 1, hidden.device)
            asked = [self._asked(rows[i], mirrors[rows[i].request_id]) for i in sampling]
            chosen = self._chosen(some_rows(hidden, ends), asked)
            sampled = dict(zip(sampling, chosen, strict=self._is_speaker))
        if not self._is_speaker:
            return ()
        return tuple(
            _joined(row, sampled.get(i), prompt)
            for i, (row, prompt) in enumerate(zip(rows, prompts, strict=True))
        )

    def _chosen(self, hidden: Tensor, asked: Sequence[SamplingRow]) -> Sequence[Sampled]:
        """A token for each row of hidden states; nothing on ranks that do not report.

        Logits are brought together only where a row needs more of them than its token.
        """
        with self._recorder.span("linear"):
            logits = self._model.logits(hidden)
        best = logits.best()
        # Where one cannot be used, something is wrong, and all logits say what.
        if all(row.is_plain for row in asked) and bool(best.values.isfinite().all()):
            return self._sampler.plain(logits, best, asked)
        whole = logits.whole()
        return self._sampler.sample(whole, asked) if self._is_speaker else ()

    def _prompt(self, row: Row, mirror: RequestMirror, hidden: Tensor) -> _Scored:
        """Log-probabilities of the prompt's tokens that this row predicts."""
        if mirror.params.prompt_logprobs is None:
            return _Scored()
        stop = min(row.start + row.num_tokens, mirror.num_prompt_tokens - 1)
        found: list[tuple[TokenLogprob, ...]] = []
        failure = ""
        for start in range(row.start, stop, LOGIT_ROWS):
            at, size = start - row.start, min(LOGIT_ROWS, stop - start)
            part = hidden[at : at + size]
            logits = self._model.logits(part).whole()  # whatever fails: the others make theirs
            if self._is_speaker and not failure:
                targets = mirror.tokens.values[start + 1 : start + 1 + size]
                try:
                    count = mirror.params.prompt_logprobs
                    found.extend(self._sampler.prompt_logprobs(logits, targets, count))
                except OutputError as error:
                    failure = str(error)
        return _Scored(tuple(found), failure)

    def _asked(self, row: Row, mirror: RequestMirror) -> SamplingRow:
        tokens, prompt = mirror.tokens.values, mirror.num_prompt_tokens
        return SamplingRow(
            request_id=row.request_id,
            params=mirror.params,
            seed=mirror.seed,
            position=row.start + row.num_tokens,
            prompt_ids=tokens[:prompt],
            output_ids=tokens[prompt:],
            eos_token_ids=self._eos_token_ids,
            allowed=row.allowed,
        )


def restored(hidden: Tensor, shares: Shares, wanted: NDArray[np.bool_], pcp: Group) -> Tensor:
    """Hidden states in the order of the step, on every PCP coordinate.

    Args:
        hidden: [n, hidden_size], of this coordinate's rows.
        shares: how rows were dealt out.
        wanted: [R], which of the step's tokens are needed; the others are not sent.
        pcp: who has them.

    Returns:
        [R, hidden_size]; undefined where nothing is wanted.
    """
    if pcp.size == 1:  # they are in order
        return hidden
    places = [shares.places(shares.parts_of(c)) for c in range(pcp.size)]
    there = [place[wanted[place]] for place in places]
    mine = torch.from_numpy(np.flatnonzero(wanted[places[pcp.rank]])).to(hidden.device)
    (gathered,) = gather_rows(pcp, [len(each) for each in there], hidden[mine])
    whole = hidden.new_empty(len(wanted), hidden.shape[1])
    whole[torch.from_numpy(np.concatenate(there)).to(hidden.device)] = gathered
    return whole


def _joined(row: Row, sampled: Sampled | None, prompt: _Scored) -> Sampled:
    if sampled is None or prompt.failure:
        return Sampled(row.request_id, None, (), prompt.entries, prompt.failure)
    return Sampled(row.request_id, sampled.token_id, sampled.logprobs, prompt.entries, sampled.failure)
