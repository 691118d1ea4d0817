"""What an attention kernel is asked and what it answers: one contract for all kinds of rows.

Each query row has its own interval of visible LOCAL keys [first, last), counted in the order in which
this rank's blocks hold the sequence. That covers one decode token, a prefill chunk over cached context,
speculative rows, a sliding window (only `first` moves) and a shard that holds nothing (first = last).
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvspan.attention.scaled import Scaled


@dataclass(frozen=True, slots=True)
class FlatIndex:
    """A `KeyIndex` in five dense int64 host tensors, for kernels that serve a step in one call.

    Args:
        row_starts: [S + 1], the rows of each sequence.
        table_starts: [S + 1], where each sequence's blocks begin in `blocks`.
        blocks: the tables, one behind the other.
        first: [R].
        last: [R].
    """

    row_starts: Tensor
    table_starts: Tensor
    blocks: Tensor
    first: Tensor
    last: Tensor


@dataclass(frozen=True)
class KeyIndex:
    """Which keys of this rank each query row sees.

    Args:
        row_starts: S + 1 row numbers; rows [row_starts[s], row_starts[s+1]) belong to sequence s.
        tables: for each sequence, its blocks on this rank in order: [blocks] int64, on the device.
        first: [R] int64, the first local key each row sees.
        last: [R] int64, one past the last local key each row sees.

    `first` and `last` are host arrays: which tiles need a mask is decided without asking the device.
    """

    row_starts: tuple[int, ...]
    tables: tuple[Tensor, ...]
    first: NDArray[np.int64]
    last: NDArray[np.int64]

    @property
    def num_rows(self) -> int:
        """R, query rows of the step."""
        return self.row_starts[-1]

    @cached_property
    def flat(self) -> FlatIndex:
        """Made once a step, however many layers ask for it."""
        starts = np.cumsum([0, *map(len, self.tables)], dtype=np.int64)
        return FlatIndex(
            row_starts=torch.tensor(self.row_starts, dtype=torch.int64),
            table_starts=torch.from_numpy(starts),
            blocks=torch.cat([torch.zeros(0, dtype=torch.int64), *(t.cpu() for t in self.tables)]),
            first=torch.from_numpy(np.ascontiguousarray(self.first)),
            last=torch.from_numpy(np.ascontiguousarray(self.last)),
        )

    @classmethod
    def over(cls, flat: FlatIndex, device: torch.device | None = None) -> "KeyIndex":
        """The index of which `flat` is the flat form, without copies.

        What is written to the tensors later is seen by kernels that ask for the flat form, and by no
        others: `tables` are cut as the tables are long at the time.

        Args:
            flat: on the host.
            device: where tables are wanted; elsewhere than on the host they are a copy.
        """
        starts = flat.table_starts.tolist()
        blocks = flat.blocks if device is None else flat.blocks.to(device)
        index = cls(
            row_starts=tuple(flat.row_starts.tolist()),
            tables=tuple(blocks[start:stop] for start, stop in pairwise(starts)),
            first=flat.first.numpy(),
            last=flat.last.numpy(),
        )
        vars(index)["flat"] = flat
        return index

    def sequences(self) -> Iterator[tuple[slice, Tensor]]:
        """The rows and the blocks of each sequence."""
        for (start, stop), table in zip(pairwise(self.row_starts), self.tables, strict=True):
            yield slice(start, stop), table

    def each(self) -> Iterator[tuple[slice, "KeyIndex"]]:
        """The rows of each sequence, and its index by itself."""
        for rows, table in self.sequences():
            starts = (0, rows.stop - rows.start)
            yield rows, KeyIndex(starts, (table,), self.first[rows], self.last[rows])

    def compacted(self) -> tuple[Tensor, "KeyIndex"]:
        """The blocks that a table names, each once [n] int64, and the index into them alone."""
        named = torch.cat(self.tables) if self.tables else torch.zeros(0, dtype=torch.int64)
        blocks, places = torch.unique(named, return_inverse=True)
        tables = places.split([len(table) for table in self.tables] + [0])[:-1]
        return blocks, replace(self, tables=tuple(tables))

    def chosen(self, which: NDArray[np.bool_]) -> tuple[NDArray[np.int64], "KeyIndex"]:
        """Some sequences by themselves.

        Args:
            which: [S], whether a sequence is chosen.

        Returns:
            the numbers of their rows [n], and their index: this one if they are all.
        """
        if which.all():
            return np.arange(self.num_rows), self
        sizes = np.diff(self.row_starts)
        rows = np.flatnonzero(np.repeat(which, sizes))
        index = KeyIndex(
            row_starts=(0, *np.cumsum(sizes[which]).tolist()),
            tables=tuple(table for table, is_one in zip(self.tables, which, strict=True) if is_one),
            first=self.first[rows],
            last=self.last[rows],
        )
        return rows, index


Cached = Tensor | Scaled
"""Keys or values as a cache holds them: of the query's dtype, or codes with their scales."""


class Kernel(Protocol):
    """Attention of query rows over this rank's shard of the cache."""

    capabilities: "Capabilities"

    def __call__(
        self, query: Tensor, keys: Cached, values: Cached, index: KeyIndex, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Partial attention. A kernel that reads no codes has them `written_out`.

        Args:
            query: [R, H, D]; H is a multiple of the KV heads, neighbours share one.
            keys: [N, Hkv, B, D], the blocks of one layer on this rank.
            values: [N, Hkv, B, Dv], of one part; may be a view of the first Dv columns of `keys`.
            index: which keys each row sees. No other slot is read.
            scale: factor on the scores, positive.

        Returns:
            out [R, H, Dv] in the query's dtype, normalised over the keys seen here, and lse [R, H]
            float32, natural log; (0, -inf) for a row that sees no key here. A row with a score that
            is NaN or infinite gets NaN, and the largest float32 for its LSE: merging takes one that is
            not finite for that of no key.
        """
        ...


def mergeable(lse: Tensor) -> Tensor:
    """An LSE of scores that may be NaN or infinite as a kernel answers it: merging loses none."""
    largest = torch.finfo(lse.dtype).max
    return lse.nan_to_num(largest, posinf=largest, neginf=-torch.inf)


def written_out(keys: Cached, values: Cached, index: KeyIndex) -> tuple[Tensor, Tensor, KeyIndex]:
    """What a step sees in the dtype of the computation, for kernels that read no codes.

    Returns:
        keys, values and index as they are, or the blocks that a table names and tables pointing there.
    """
    if not isinstance(keys, Scaled) or not isinstance(values, Scaled):
        assert isinstance(keys, Tensor)
        assert isinstance(values, Tensor)
        return keys, values, index
    blocks, there = index.compacted()
    made = keys.blocks(blocks)
    if values.codes.data_ptr() == keys.codes.data_ptr():  # a value is the beginning of its key
        return made, made[..., : sum(values.parts)], there
    return made, values.blocks(blocks), there


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What a model wants of a kernel.

    Args:
        device: torch device type, e.g. `cpu`.
        dtype: of queries, keys and values.
        head_dim: D of queries and keys.
        value_dim: Dv of values.
    """

    device: str
    dtype: torch.dtype
    head_dim: int
    value_dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a kernel can do.

    Args:
        devices: device types it runs on; empty = any.
        dtypes: dtypes it takes; empty = any floating dtype.
        equal_dims: whether it wants `value_dim == head_dim`.
        dim_multiple: what `head_dim` and `value_dim` must be multiples of.
        absent: why it can serve nothing here; empty = it can.
    """

    devices: tuple[str, ...] = ()
    dtypes: tuple[torch.dtype, ...] = ()
    equal_dims: bool = False
    dim_multiple: int = 1
    absent: str = ""

    def refuse(self, need: Need) -> str | None:
        """Why the kernel cannot serve `need`, as a sentence's end; None if it can."""
        if self.absent:
            return self.absent
        if self.devices and need.device not in self.devices:
            return f"device {need.device} (has {', '.join(self.devices)})"
        if self.dtypes and need.dtype not in self.dtypes:
            return f"dtype {need.dtype} (has {', '.join(map(str, self.dtypes))})"
        if self.equal_dims and need.head_dim != need.value_dim:
            return f"value dim {need.value_dim} beside head dim {need.head_dim} (wants them equal)"
        for dim in (need.head_dim, need.value_dim):
            if dim % self.dim_multiple:
                return f"head dim {dim} (wants multiples of {self.dim_multiple})"
        return None
