"""What tokens are drawn by: exp((logit - greatest) / temperature), counted, collected and drawn from.

The extension makes weights anew in each pass and keeps none; torch does the same with whole tensors.
Knows no rows' wishes, no ranks and no randomness. Legend: R rows, V logits of a row.

Counted coarsely, weights lie in octaves: octave i has those in [2^-i, 2^(1-i)), and octave 0 the
greatest, 1. The last one has all that is smaller. A weight of 0 is in none.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kvspan.native import extension, native_path

OCTAVES = 64
"""As many as `csrc/draw.h` has."""


class Weights(Protocol):
    """The weights of some rows."""

    def totals(self) -> Tensor:
        """[R] float64, the sum of each row."""
        ...

    def octaves(self) -> tuple[Tensor, Tensor]:
        """Sums [R, OCTAVES] float64 and counts [R, OCTAVES] int64 of each octave."""
        ...

    def collect(self, last: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
        """What octaves 0 .. `last` have.

        Args:
            last: [R] int64.
            sizes: [R] int64, how many each row has in them.

        Returns:
            Row after row, in order of place: [sum(sizes)] int64 places, and float64 weights.
        """
        ...

    def pick(self, goals: Tensor) -> Tensor:
        """The first place at which the running sum of a row passes its goal.

        Args:
            goals: [R] float64; below 0 = nothing is to be picked.

        Returns:
            [R] int64; if rounding hides it, the last place with a weight; -1 if there is none.
        """
        ...


def draw_weights(logits: Tensor, *, greatest: Tensor, temperature: Tensor, least: Tensor) -> Weights:
    """The weights of logits, or of those that one rank has.

    Args:
        logits: [R, V] float32 without NaN; V may be 0.
        greatest: [R] float64, finite; no logit is more.
        temperature: [R] float64, > 0.
        least: [R] float64; a smaller weight is 0.
    """
    native = logits.device.type == "cpu" and native_path().isa is not None
    return (_Native if native else _Plain)(logits, greatest, temperature, least)


@dataclass(frozen=True, slots=True, eq=False)
class _Plain:
    """By torch. The arguments are those of `draw_weights`."""

    logits: Tensor
    greatest: Tensor
    temperature: Tensor
    least: Tensor

    def totals(self) -> Tensor:
        """See `Weights.totals`."""
        return self._weights().sum(-1)

    def octaves(self) -> tuple[Tensor, Tensor]:
        """See `Weights.octaves`."""
        weights = self._weights()
        counted, places = weights.new_zeros(2, len(weights), OCTAVES + 1), _octaves_of(weights)
        counted[0].scatter_add_(1, places, weights)
        counted[1].scatter_add_(1, places, torch.ones_like(weights))
        return counted[0, :, :OCTAVES], counted[1, :, :OCTAVES].long()

    def collect(self, last: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        """See `Weights.collect`."""
        weights = self._weights()
        rows, places = (_octaves_of(weights) <= last[:, None]).nonzero().unbind(1)
        return places, weights[rows, places]

    def pick(self, goals: Tensor) -> Tensor:
        """See `Weights.pick`."""
        weights = torch.nn.functional.pad(self._weights(), (1, 0))  # place -1, which every row has
        passed = weights.cumsum(-1) > goals[:, None]
        places = torch.arange(weights.shape[1], device=goals.device)
        last = torch.where(weights > 0, places, 0).amax(-1)
        found = torch.where(passed.any(-1), passed.int().argmax(-1), last)
        return torch.where(goals < 0, 0, found) - 1

    def _weights(self) -> Tensor:
        """[R, V] float64."""
        exponents = (self.logits.double() - self.greatest[:, None]) / self.temperature[:, None]
        weights = exponents.exp()
        return weights.masked_fill(weights < self.least[:, None], 0.0)


class _Native:
    """By the extension. The arguments are those of `draw_weights`."""

    def __init__(self, *tensors: Tensor) -> None:
        self._tensors = tensors  # whose memory is read
        logits, *of_rows = tensors
        self._num_rows, size = logits.shape
        addresses = (each.data_ptr() for each in of_rows)
        self._weights = extension().DrawWeights(
            logits.data_ptr(), self._num_rows, logits.stride(0), size, *addresses
        )

    def totals(self) -> Tensor:
        """See `Weights.totals`."""
        sums = torch.empty(self._num_rows, dtype=torch.float64)
        self._weights.totals(torch.get_num_threads(), sums.data_ptr())
        return sums

    def octaves(self) -> tuple[Tensor, Tensor]:
        """See `Weights.octaves`."""
        sums = torch.empty(self._num_rows, OCTAVES, dtype=torch.float64)
        counts = torch.empty(self._num_rows, OCTAVES, dtype=torch.int64)
        self._weights.octaves(torch.get_num_threads(), sums.data_ptr(), counts.data_ptr())
        return sums, counts

    def collect(self, last: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
        """See `Weights.collect`."""
        ends = sizes.cumsum(0)
        firsts, count = ends - sizes, int(sizes.sum())
        places, weights = torch.empty(count, dtype=torch.int64), torch.empty(count, dtype=torch.float64)
        addresses = (each.data_ptr() for each in (last, firsts, places, weights))
        self._weights.collect(torch.get_num_threads(), *addresses)
        return places, weights

    def pick(self, goals: Tensor) -> Tensor:
        """See `Weights.pick`."""
        places = torch.empty(self._num_rows, dtype=torch.int64)
        self._weights.pick(torch.get_num_threads(), goals.data_ptr(), places.data_ptr())
        return places


def _octaves_of(weights: Tensor) -> Tensor:
    """[R, V] int64: of each weight its octave, of 0 the number behind the last."""
    octaves = (1 - weights.frexp().exponent).clamp_max(OCTAVES - 1).long()
    return torch.where(weights > 0, octaves, OCTAVES)
