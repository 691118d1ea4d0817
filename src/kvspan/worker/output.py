"""Hidden states -> what a step gives: sampled tokens and log-probabilities.

Each PCP coordinate chooses the tokens of its own rows, and only tokens travel; where coordinates are a
team, they share the vocabulary out and choose for all rows. Rows that ask for more are brought to the
first coordinate. Every rank of one makes its part of the logits, in the same number
of pieces, and helps to draw from it; rank 0 alone reports.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from math import isfinite

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvspan.attention.prefill import row_numbers
from kvspan.comm.group import Group
from kvspan.errors import OutputError
from kvspan.layers.logits import Logits
from kvspan.layers.rows import are_all, gather_rows, some_rows
from kvspan.models.base import Model
from kvspan.sampling.sampler import Sampler, SamplingRow
from kvspan.step import Row, Sampled, TokenLogprob
from kvspan.worker.batch import Mirrors, RequestMirror
from kvspan.worker.runner import Ran
from kvspan.worker.share import Shares
from kvspan.worker.watch import Recorder

_UNUSABLE = -1
"""Instead of a token, where logits have none."""

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
        pcp: the coordinates; the speaker is of the first.
        recorder: notes the time that logits take.
    """

    def __init__(
        self,
        model: Model,
        sampler: Sampler,
        *,
        eos_token_ids: Sequence[int],
        is_speaker: bool,
        pcp: Group,
        recorder: Recorder,
    ) -> None:
        self._model, self._sampler, self._recorder = model, sampler, recorder
        self._eos_token_ids = eos_token_ids
        self._is_speaker, self._pcp = is_speaker, pcp

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

    def of(self, rows: Sequence[Row], mirrors: Mirrors, ran: Ran, shares: Shares) -> tuple[Sampled, ...]:
        """One entry a row on the speaker, nothing elsewhere.

        Args:
            rows: the step's rows.
            mirrors: what is known of their requests.
            ran: what this coordinate's tokens gave, n of them.
            shares: which of the step's tokens those are.
        """
        known = [mirrors[row.request_id] for row in rows]
        sampling = [i for i, row in enumerate(rows) if row.sample]
        asked = [self._asked(rows[i], known[i]) for i in sampling]
        ends = np.cumsum([row.num_tokens for row in rows])
        chosen: Sequence[Sampled] | None = None
        prompts = [_Scored()] * len(rows)
        if all(row.is_plain for row in asked) and all(m.params.prompt_logprobs is None for m in known):
            choose = self._by_team if shares.team else self._by_coordinates
            chosen = choose(ran, shares, ends[sampling] - 1, asked)
        if chosen is None:
            hidden = restored(ran.hidden, shares, self.wanted(rows, mirrors), self._pcp)
            if self._pcp.rank > 0:
                return ()
            starts = ends - [row.num_tokens for row in rows]
            prompts = [
                self._prompt(row, mirror, hidden[a:])
                for row, mirror, a in zip(rows, known, starts, strict=True)
            ]
            chosen = self._chosen(Ran(hidden, ran.logits), ends[sampling] - 1, asked)
        if not self._is_speaker:
            return ()
        sampled = dict(zip(sampling, chosen, strict=True))
        return tuple(
            _joined(row, sampled.get(i), prompt)
            for i, (row, prompt) in enumerate(zip(rows, prompts, strict=True))
        )

    def _by_coordinates(
        self, ran: Ran, shares: Shares, ends: NDArray[np.int64], asked: Sequence[SamplingRow]
    ) -> Sequence[Sampled] | None:
        """What every coordinate chooses for its own rows; None if some row's logits cannot be used.

        Args:
            ran: what this coordinate's tokens gave.
            shares: which of the step's tokens each coordinate has.
            ends: which of the step's tokens the rows end with, in order.
            asked: those rows; all are plain.
        """
        if not asked:
            return ()
        places, numbers = zip(*_ended_by_each(ends, shares, self._pcp), strict=True)
        own = self._pcp.rank
        tokens = self._tokens(ran, places[own], [asked[i] for i in numbers[own]])
        gathered = self._pcp.all_gather(tokens, [len(each) for each in numbers]).wait().tolist()
        if any(token == _UNUSABLE for token in gathered):
            return None
        chosen = dict(zip(chain.from_iterable(numbers), gathered, strict=True))
        return [Sampled(row.request_id, chosen[i]) for i, row in enumerate(asked)]

    def _by_team(
        self, ran: Ran, shares: Shares, ends: NDArray[np.int64], asked: Sequence[SamplingRow]
    ) -> Sequence[Sampled] | None:
        """The same by all coordinates for all rows, of logits that they share out."""
        if not asked:
            return ()
        places, numbers = zip(*_ended_by_each(ends, shares, self._pcp), strict=True)
        if ran.team_logits is not None:
            first = np.cumsum([0, *shares.team])
            logits = ran.team_logits.of_rows(
                [int(first[c] + place) for c, its in enumerate(places) for place in its]
            )
        else:
            own = row_numbers(places[self._pcp.rank], ran.hidden.device)
            with self._recorder.span("linear"):
                hidden = some_rows(ran.hidden, own)
                logits = self._model.logits(hidden, [len(each) for each in numbers])
        rows = [asked[i] for i in chain.from_iterable(numbers)]
        tokens = self._drawn(logits, rows).tolist()
        if _UNUSABLE in tokens:
            return None
        by_row = dict(zip(chain.from_iterable(numbers), tokens, strict=True))
        return [Sampled(row.request_id, by_row[i]) for i, row in enumerate(asked)]

    def _tokens(self, ran: Ran, ends: NDArray[np.int64], asked: Sequence[SamplingRow]) -> Tensor:
        """[R] int64 of rows that are plain, of logits that stay shared out; -1 where they are no use."""
        if not asked:
            return torch.empty(0, dtype=torch.int64, device=ran.hidden.device)
        return self._drawn(self._logits(ran, ends), asked)

    def _drawn(self, logits: Logits, asked: Sequence[SamplingRow]) -> Tensor:
        best = logits.best()
        if not all(map(isfinite, best.values.tolist())):
            return torch.full_like(best.tokens, _UNUSABLE)
        return self._sampler.plain(logits, best, asked)

    def _chosen(
        self, ran: Ran, ends: NDArray[np.int64], asked: Sequence[SamplingRow]
    ) -> Sequence[Sampled]:
        """A token for each of some rows, of logits that are brought together; none but on the speaker.

        Args:
            ran: what all tokens of the step gave.
            ends: which of them the rows end with.
            asked: the rows.
        """
        if not asked:
            return ()
        logits = self._logits(ran, ends).whole()
        return self._sampler.sample(logits, asked) if self._is_speaker else ()

    def _logits(self, ran: Ran, ends: NDArray[np.int64]) -> Logits:
        """Those of some tokens, in order; a collective, unless they have been made."""
        rows = row_numbers(ends, ran.hidden.device)
        if ran.logits is not None and are_all(rows, len(ran.hidden)):
            return ran.logits
        with self._recorder.span("linear"):
            return self._model.logits(some_rows(ran.hidden, rows))

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


def _ended_by_each(
    ends: NDArray[np.int64], shares: Shares, pcp: Group
) -> list[tuple[NDArray[np.int64], Sequence[int]]]:
    """Which of each coordinate's tokens end a row, and which rows those are.

    Args:
        ends: which of the step's tokens the rows end with, in order.
        shares: which of the step's tokens each coordinate has.
        pcp: the coordinates.
    """
    if pcp.size == 1:  # it has them in order
        return [(ends, range(len(ends)))]
    found: list[tuple[NDArray[np.int64], Sequence[int]]] = []
    for coordinate in range(pcp.size):
        is_own = coordinate == pcp.rank
        places = shares.places(shares.network_parts if is_own else shares.parts_of(coordinate))
        rows = np.searchsorted(ends, places)
        is_end = np.append(ends, -1)[rows] == places
        found.append((np.flatnonzero(is_end), rows[is_end].tolist()))
    return found


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
