"""The vocabulary's two ends, its rows shared over ranks. Knows groups; knows no models."""

from torch import Tensor

from kvspan.comm.group import Group
from kvspan.layers.linear import Matrix, Storage, gather_columns
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
        self.group, self.parts, self._hidden_size = group, parts, hidden_size

    @property
    def part(self) -> Span:
        """Rows of the table that this rank keeps."""
        return self.parts[self.group.rank]

    def forward(self, token_ids: Tensor) -> Tensor:
        """[R] int64 -> [R, hidden_size], whole on every rank."""
        local = token_ids - self.part.start
        mine = (local >= 0) & (local < self.part.size)
        found = self.product.rows(local[mine])
        rows = found.new_zeros(len(token_ids), self._hidden_size)
        rows[mine] = found
        return self.group.all_reduce(rows).wait()

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, hidden_size] -> [n, vocab_size] float32, whole on every rank."""
        return gather_columns(self.product.wide(hidden), self.group, self.parts)
