"""The vocabulary's two ends, its rows shared over ranks. Knows groups; knows no models."""

from torch import Tensor, nn
from torch.nn import functional as F

from kvspan.comm.group import Group
from kvspan.layers.linear import Storage, gather_columns
from kvspan.topology import Span, cuts


class VocabEmbedding(nn.Module):
    """Token ids to vectors, and vectors to logits, over one table whose rows are shared out.

    Args:
        vocab_size: rows of the whole table.
        hidden_size: width of a row.
        group: the ranks that share the rows.
    """

    def __init__(self, vocab_size: int, hidden_size: int, *, group: Group, storage: Storage) -> None:
        super().__init__()
        self.group = group
        self.parts = cuts(vocab_size, parts=group.size)
        self.weight = storage.empty(self.part.size, hidden_size)

    @property
    def part(self) -> Span:
        """Rows of the table that this rank keeps."""
        return self.parts[self.group.rank]

    def forward(self, token_ids: Tensor) -> Tensor:
        """[R] int64 -> [R, hidden_size], whole on every rank."""
        local = token_ids - self.part.start
        mine = (local >= 0) & (local < self.part.size)
        rows = self.weight.new_zeros(len(token_ids), self.weight.shape[1])
        rows[mine] = self.weight[local[mine]]
        return self.group.all_reduce(rows).wait()

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, hidden_size] -> [n, vocab_size] float32, whole on every rank."""
        return gather_columns(F.linear(hidden, self.weight), self.group, self.parts).float()
