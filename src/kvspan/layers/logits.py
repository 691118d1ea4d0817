"""Logits whose vocabulary ranks share out: what can be known of them without bringing them together.

Knows groups. Knows no sampling and no models.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvspan.comm.group import Group
from kvspan.comm.local import solo
from kvspan.layers.best import Best, best
from kvspan.layers.linear import gather_columns
from kvspan.topology import Span


@dataclass(frozen=True, slots=True, eq=False)
class Logits:
    """Some rows' logits. What is asked of them is a collective, and has the same answer on every rank.

    Args:
        mine: [R, parts[group.rank].size] float32, of this rank's tokens.
        group: who has the others.
        parts: which tokens each rank has, in order and without gaps.
        largest: of `mine`; None = it is found when it is asked for.
    """

    mine: Tensor
    group: Group
    parts: Sequence[Span]
    largest: Best | None = None

    @classmethod
    def of_one(cls, logits: Tensor) -> "Logits":
        """Logits that are whole: [R, V] float32."""
        return cls(logits, solo(), [Span(0, logits.shape[-1])])

    @property
    def first_token(self) -> int:
        """The token that this rank's first logit belongs to."""
        return self.parts[self.group.rank].start

    @property
    def vocab_size(self) -> int:
        """V, of all ranks together."""
        return self.parts[-1].stop

    def of_rows(self, numbers: Sequence[int]) -> "Logits":
        """Some of the rows, in this order; nothing is copied if it is all of them in theirs."""
        rows = list(numbers)
        if rows == list(range(len(self.mine))):
            return self
        largest = self.largest and Best(self.largest.values[rows], self.largest.tokens[rows])
        return Logits(self.mine[rows], self.group, self.parts, largest)

    def with_largest(self) -> "Logits":
        """These, with the largest of each row that this rank has. No collective."""
        return replace(self, largest=best(self.mine))

    def whole(self) -> Tensor:
        """[R, V] float32."""
        return gather_columns(self.mine, self.group, self.parts)

    def from_all(self, mine: Tensor) -> Tensor:
        """What every rank has to say: [...], of the same shape on each, becomes [T, ...]."""
        return self.group.all_gather(mine[None], [1] * self.group.size).wait()

    def best(self) -> Best:
        """The largest of each row: 16 bytes of a row travel, and no logits."""
        found = self.largest or best(self.mine)
        if len(self.parts) == 1:
            return found  # of all columns; what is spared is a dozen operators, a tenth of a millisecond
        tokens = found.tokens + self.first_token
        every = self.from_all(torch.stack([found.values.double(), tokens.double()]))  # both are exact
        whose = every[:, 0].argmax(0)  # a NaN is larger than all; of ranks alike the first
        rows = torch.arange(len(tokens), device=tokens.device)
        values, chosen = every[whose, :, rows].unbind(1)
        return Best(values.float(), chosen.long())
