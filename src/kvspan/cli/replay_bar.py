"""How far a replay is, on a terminal: requests answered, running and failed, tokens a second."""

from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kvspan.bench.record import Observed

_REFRESH_S = 0.2  # counting all records after each step of a small model would take longer than the step


class ReplayBar:
    """A progress bar; on anything but a terminal it shows nothing.

    Args:
        console: where it is drawn.
        total: requests.
        name: what runs.
    """

    def __init__(self, console: Console, total: int, name: str = "Requests") -> None:
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[state]}"),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task(name, total=total, state="")
        self._shown_s = -_REFRESH_S

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def show(self, observed: Observed, now_s: float) -> None:
        """Draws where a replay is, `now_s` seconds after its start."""
        if self._bar.disable or now_s < self._shown_s + _REFRESH_S:
            return
        self._shown_s = now_s
        records = observed.records
        ended = sum(r.end_s is not None for r in records)
        errors = sum(r.error is not None for r in records)
        rate = sum(r.output_tokens for r in records) / max(now_s, 1e-9)
        state = f"{len(records) - ended} under way, {errors} errors, {rate:,.1f} tok/s"
        self._bar.update(self._task, completed=ended, state=state)
