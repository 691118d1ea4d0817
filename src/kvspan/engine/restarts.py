"""How often something that was lost is started again. Knows a clock and nothing of engines."""

from kvspan.clock import Clock

WINDOW_S = 600.0
"""Restarts are counted over this long: what dies at each start is given up, and what is killed once a
day is not."""


class Restarts:
    """A number of restarts within `WINDOW_S`.

    Args:
        most: how many; 0 = none.
        clock: to tell when.
    """

    def __init__(self, most: int, clock: Clock) -> None:
        self._most, self._clock = most, clock
        self._taken_s: list[float] = []

    @property
    def why_none(self) -> str:
        """A clause for when there is none left, with the flag that bounds them."""
        if not self._most:
            return "--no-restart says so"
        return f"there were {self._most} restart(s) in ten minutes (--max-restarts)"

    def take(self) -> bool:
        """Takes one; False when there is none left."""
        now_s = self._clock.now_s()
        self._taken_s = [at_s for at_s in self._taken_s if now_s - at_s < WINDOW_S]
        if len(self._taken_s) >= self._most:
            return False
        self._taken_s.append(now_s)
        return True
