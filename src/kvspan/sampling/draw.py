"""Draws tokens from logits that ranks share out: in a few numbers a row, and never all logits.

Every rank says how much weight its tokens have; then the one in whose part the running sum passes the
drawn number has the token. Where `top_k` or `top_p` leave tokens out, weights are counted by octaves; so
all know in which octave a row's cut lies, put together those few tokens that come into question, and
draw among them. Legend: R rows, V the vocabulary, T ranks.

Sums run in order of token id, not of probability: the last bits of logits depend on how the model was
split over ranks and on what shared the batch, and where two tokens are nearly alike a sort would
exchange them and hand the number to another token. In this order, boundaries move by as little as the
probabilities do. float64, since 50,000 terms in float32 would lose the rarest.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvspan.layers.logits import Logits
from kvspan.request import SamplingParams
from kvspan.sampling.weights import OCTAVES, Weights, draw_weights


def draw(
    logits: Logits, greatest: Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float]
) -> Tensor:
    """Draws a token for each row: temperature, `min_p`, `top_k`, `top_p`, the draw. A collective.

    Args:
        logits: of R rows, adjusted.
        greatest: [R] float32, the largest logit of each; finite.
        params: of each row; no temperature is 0.
        uniforms: R numbers in [0, 1): where in its row's weights each draw falls.

    Returns:
        [R] int64; never a token of weight 0.
    """
    columns = [(p.temperature, p.min_p, u) for p, u in zip(params, uniforms, strict=True)]
    of_rows = torch.tensor(columns, dtype=torch.float64, device=greatest.device)
    temperature, least, shares = of_rows.reshape(-1, 3).T.contiguous()
    rows = _Rows(logits, greatest.double(), temperature, least, shares)
    cuts = [_Cut(p.top_k if p.top_k < logits.vocab_size else 0, p.top_p) for p in params]
    cut = [i for i, each in enumerate(cuts) if each.top_k > 0 or each.top_p < 1]
    others = [i for i in range(len(params)) if i not in set(cut)]
    tokens = torch.empty(len(params), dtype=torch.int64, device=greatest.device)
    if others:
        tokens[others] = _of_all(rows.some(others))
    if cut:
        tokens[cut] = _of_few(rows.some(cut), [cuts[i] for i in cut])
    return tokens


@dataclass(frozen=True, slots=True)
class _Cut:
    """What a row leaves out.

    Args:
        top_k: tokens that stay at most; 0 or less = all.
        top_p: of the weight of those, what the most probable that stay have together.
    """

    top_k: int
    top_p: float


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """Rows to draw for; each tensor but the logits is [R] float64.

    Args:
        logits: theirs.
        greatest: the largest logit.
        temperature: by which they are divided.
        least: weights below it are 0.
        shares: where in the sum of the weights the draw falls, in [0, 1).
    """

    logits: Logits
    greatest: Tensor
    temperature: Tensor
    least: Tensor
    shares: Tensor

    def some(self, numbers: Sequence[int]) -> "_Rows":
        """Some of them, in this order."""
        which = list(numbers)
        per_row = (self.greatest[which], self.temperature[which], self.least[which], self.shares[which])
        return _Rows(self.logits.of_rows(which), *per_row)

    def weights(self) -> Weights:
        """Those of this rank's tokens."""
        return draw_weights(
            self.logits.mine, greatest=self.greatest, temperature=self.temperature, least=self.least
        )


def _of_all(rows: _Rows) -> Tensor:
    """[R] int64, drawn from every token that has a weight."""
    weights, rank = rows.weights(), rows.logits.group.rank
    sums = rows.logits.from_all(weights.totals())  # [T, R]
    ends = sums.cumsum(0)
    goals = rows.shares * ends[-1]
    owners = (ends > goals).int().argmax(0)  # the first of them
    within = goals - (ends[rank] - sums[rank])
    places = weights.pick(torch.where(owners == rank, within.clamp_min(0.0), -1.0))
    mine = torch.where(owners == rank, places + rows.logits.first_token, -1)
    return rows.logits.from_all(mine).amax(0)


def _of_few(rows: _Rows, cuts: Sequence[_Cut]) -> Tensor:
    """[R] int64, drawn from the tokens that each row's cut leaves."""
    logits, draw_from = rows.logits, rows.weights()
    mine_sums, mine_counts = draw_from.octaves()
    octaves = logits.from_all(torch.stack([mine_sums, mine_counts.double()]))  # [T, 2, R, OCTAVES]
    below = octaves.cumsum(-1)  # [T, 2, R, OCTAVES]: of octaves 0 .. i
    sums, counts = below.sum(0).cpu().numpy()
    last = torch.tensor([_last_octave(*each) for each in zip(sums, counts, cuts, strict=True)])
    last = last.to(rows.shares.device)
    sizes = below[:, 1, torch.arange(len(last), device=last.device), last].long()  # [T, R]
    mine = sizes[logits.group.rank]
    places, weights = draw_from.collect(last, mine)
    numbers = torch.arange(len(mine), device=mine.device).repeat_interleave(mine)
    found = torch.stack(
        [places + logits.first_token, logits.mine[numbers, places], weights], dim=1
    ).contiguous()  # [n, 3] float64, which all three are exact in
    gathered = logits.group.all_gather(found, sizes.sum(1).tolist()).wait().cpu().numpy()
    whose = np.tile(np.arange(len(cuts)), len(sizes)).repeat(sizes.flatten().cpu().numpy())
    tokens = [
        _drawn(gathered[whose == i], cut, whole=float(sums[i, -1]), share=share)
        for i, (cut, share) in enumerate(zip(cuts, rows.shares.tolist(), strict=True))
    ]
    return torch.tensor(tokens, device=last.device)


def _last_octave(sums: NDArray[np.float64], counts: NDArray[np.float64], cut: _Cut) -> int:
    """The octave behind which `top_k` and `top_p` take nothing.

    Args:
        sums: [OCTAVES] weight of octaves 0 .. i.
        counts: [OCTAVES] tokens of them.
        cut: of the row.
    """
    # `top_p` is a part of what `top_k` leaves, so where both cut, all that it leaves is looked at.
    enough = counts >= cut.top_k if cut.top_k > 0 else sums >= cut.top_p * sums[-1]
    return int(enough.argmax()) if enough.any() else OCTAVES - 1


def _drawn(found: NDArray[np.float64], cut: _Cut, *, whole: float, share: float) -> int:
    """Draws from the `top_k` tokens, and of those from the fewest that together have `top_p`.

    A token stays if the more probable ones have less than `top_p` of the whole (which is what `top_k`
    left), so the first always does. Of two alike the one with the lower id is the more probable.

    Args:
        found: [n, 3] tokens in order, their logits and weights: all that come into question.
        cut: of the row.
        whole: weight of the whole row.
        share: where in the weight of those that stay the draw falls.
    """
    tokens, logits, weights = found.T
    order = np.argsort(-logits, kind="stable")
    if cut.top_k > 0:
        order = order[: cut.top_k]
        whole = float(weights[order].sum())
    before = np.concatenate([[0.0], np.cumsum(weights[order])[:-1]])
    stays = np.zeros(len(tokens), np.bool_)
    stays[order[(before < cut.top_p * whole) | (cut.top_p == 1)]] = True  # 1 keeps what rounding hides
    running = np.cumsum(weights[stays])
    place = np.searchsorted(running, share * running[-1], side="right")
    return int(tokens[stays][place])
