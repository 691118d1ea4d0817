"""The vocabulary's two ends, its rows shared over ranks. Knows groups; knows no models."""

from torch import Tensor

from kvspan.comm.group import Group
from kvspan.layers.linear import Matrix, Storage
from kvspan.layers.logits import Logits
from kvspan.topology import Span, cuts


class VocabEmbedding(Matrix):
    """Token ids to vectors, and vectors to logits, over one table whose rows are shared out.

    Args:
        vocab_size: rows of the whole table.
        hidden_size: width of a row.
        group: the ranks that share the rows.
    """

    def __init__(self, vocab_size: int, hidden_size: int, *, group: Group, storage: Storage) -> None:
        parts = cuts(vocab_size, parts=group.size)
        super().__init__(parts[group.rank].size, hidden_size, bias=False, storage=storage)
        self.group, self.parts = group, parts

    @property
    def part(self) -> Span:
        """Rows of the table that this rank keeps."""
        return self.parts[self.group.rank]

    def forward(self, token_ids: Tensor) -> Tensor:
        """[R] int64 -> [R, hidden_size], whole on every rank."""
        return self.group.all_reduce(self.product.rows(token_ids, first=self.part.start)).wait()

    def logits(self, hidden: Tensor) -> Logits:
        """[n, hidden_size] -> the logits of this rank's tokens, [n, vocab_size] of all together."""
        return Logits(self.product.wide(hidden), self.group, self.parts)
