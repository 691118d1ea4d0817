"""The vocabulary's two ends, its rows shared over ranks. Knows groups; knows no models."""

from torch import Tensor

from kvspan.comm.group import Group
from kvspan.layers.linear import Matrix, Storage
from kvspan.layers.logits import Logits
from kvspan.layers.team import Team
from kvspan.topology import Span, cuts

NO_TOKEN = -1
"""In place of a token id: zeros, which parts of a layer that have no biases leave as they are."""


class VocabEmbedding(Matrix):
    """Token ids to vectors, and vectors to logits, over one table whose rows are shared out.

    Args:
        vocab_size: rows of the whole table.
        hidden_size: width of a row.
        group: the ranks that share the rows.
        everyone: ranks with the same rows as well, which may share those out (`layers.team`); ranks
            with the same ones side by side.
    """

    def __init__(
        self, vocab_size: int, hidden_size: int, *, group: Group, everyone: Group, storage: Storage
    ) -> None:
        parts = cuts(vocab_size, parts=group.size)
        super().__init__(parts[group.rank].size, hidden_size, bias=False, storage=storage)
        self.group, self.everyone, self.parts = group, everyone, parts

    @property
    def part(self) -> Span:
        """Rows of the table that this rank keeps."""
        return self.parts[self.group.rank]

    def forward(self, token_ids: Tensor) -> Tensor:
        """[R] int64, or `NO_TOKEN` -> [R, hidden_size], whole on every rank."""
        return self.group.all_reduce(self.product.rows(token_ids, first=self.part.start)).wait()

    def logits(self, hidden: Tensor, team: Team) -> Logits:
        """The logits of this rank's tokens; together all of them.

        Args:
            hidden: [n, hidden_size], own rows.
            team: who makes which of them, for the rows of all.

        Returns:
            [rows of the team, vocab_size], shared out.
        """
        if team.size == 1:
            return Logits(self.product.wide(hidden), self.group, self.parts)
        mine = self.product.wide(team.gathered(hidden), team.part(self.part.size))
        parts = [its.shifted(part.start) for part in self.parts for its in team.parts(part.size)]
        return Logits(mine, self.everyone, parts)
