"""Random weights for any config, to measure or to try a layout without a checkpoint.

A value depends only on the seed, the tensor's name and its place in the whole tensor, so every layout
cuts its parts from the same weights. Knows no model: names and shapes are those that it asks for.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvspan.topology import Span

_STD = 0.02
_ROWS_A_BLOCK = 1024
"""Rows (dim 0) that are drawn together; a part costs no more than the blocks it touches."""


@dataclass(frozen=True, slots=True)
class DummyTensor:
    """A tensor that is drawn when it is read.

    Args:
        name: its name, which seeds it.
        shape: its whole shape.
        where: the checkpoint.
        seed: of the whole checkpoint.
    """

    name: str
    shape: tuple[int, ...]
    where: str
    seed: int

    def read(self, take: Sequence[Span]) -> Tensor:
        """Draws one part, float32; see `LazyTensor.read`."""
        if self.name.endswith("norm.weight"):
            return torch.ones([span.size for span in take])
        rows, *inner = take
        first, last = rows.start // _ROWS_A_BLOCK, -(-rows.stop // _ROWS_A_BLOCK)
        columns = tuple(slice(span.start, span.stop) for span in inner)
        blocks = [self._block(i)[:, *columns] for i in range(first, max(last, first + 1))]
        start = rows.start - first * _ROWS_A_BLOCK
        return torch.cat(blocks)[start : start + rows.size]

    def _block(self, index: int) -> Tensor:
        """Rows [index * 1024, ...) of the whole tensor."""
        num_rows = min(_ROWS_A_BLOCK, self.shape[0] - index * _ROWS_A_BLOCK)
        key = hashlib.blake2b(f"{self.seed}/{index}/{self.name}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(key, "little", signed=True))
        return torch.randn(max(num_rows, 0), *self.shape[1:], generator=generator) * _STD


@dataclass(frozen=True, slots=True)
class DummyCheckpoint:
    """A config with random weights.

    Args:
        raw_config: the config.
        where: where the config came from.
        seed: fixes all weights.
    """

    raw_config: Mapping[str, Any]
    where: str
    seed: int

    def tensors(self, wanted: Mapping[str, tuple[int, ...]], /) -> Iterator[DummyTensor]:
        """Exactly the tensors that the model wants; see `Checkpoint.tensors`."""
        return (DummyTensor(name, shape, self.where, self.seed) for name, shape in wanted.items())
