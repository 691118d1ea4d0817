"""How fast this machine reads memory, with the threads that what is measured beside it has."""

import torch

from kvspan.clock import WallClock

_BYTES = 256 << 20
"""Past every cache."""


class ReadBandwidth:
    """A piece of memory to read from end to end.

    Args:
        num_threads: that read it.
    """

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        self._memory = torch.ones(_BYTES // 4, dtype=torch.int32)
        self._clock = WallClock()

    def measure(self) -> float:
        """Bytes a second, the best of three."""
        before = torch.get_num_threads()
        torch.set_num_threads(self._num_threads)
        try:
            return max(self._once() for _ in range(3))
        finally:
            torch.set_num_threads(before)

    def _once(self) -> float:
        start_s = self._clock.now_s()
        self._memory.max()
        return _BYTES / (self._clock.now_s() - start_s)
