"""An array that grows at the end. Knows nothing of what it holds."""

from collections.abc import Sequence
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

Scalar = TypeVar("Scalar", bound=np.generic)


class Grown(Generic[Scalar]):
    """An array that grows at the end; its capacity doubles, so that appending is O(1) in the mean.

    Args:
        values: [n], what it holds at first.
    """

    def __init__(self, values: NDArray[Scalar]) -> None:
        self._buffer = values
        self._length = len(values)

    @property
    def values(self) -> NDArray[Scalar]:
        """What has been put in; a view."""
        return self._buffer[: self._length]

    def extend(self, values: NDArray[np.integer] | Sequence[int]) -> None:
        """Puts further values at the end."""
        length = self._length + len(values)
        if length > len(self._buffer):
            grown = np.empty(max(length, 2 * len(self._buffer)), self._buffer.dtype)
            grown[: self._length] = self.values
            self._buffer = grown
        self._buffer[self._length : length] = values
        self._length = length
