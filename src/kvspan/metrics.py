"""Counters, gauges and histograms: numbers that somebody may read at any time.

A name ends in its unit, or in `_total` for a count. Knows neither who counts nor who reads; no HTTP.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

Labels = tuple[str, ...]
"""Values of a metric's labels, in their order."""


class MetricKind(StrEnum):
    """How a metric's numbers are to be read."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Distribution:
    """How values spread.

    Args:
        counts: of values in each bucket, not cumulated; the last has those over every bound.
        total: their sum.
    """

    counts: tuple[int, ...]
    total: float


class Metric:
    """One name with its numbers, one for each set of labels.

    Args:
        kind: how it is to be read.
        name: with its unit.
        help: a line for whoever reads it.
        labels: names of its labels.
    """

    def __init__(self, kind: MetricKind, name: str, help: str, labels: Sequence[str] = ()) -> None:
        self.kind, self.name, self.help, self.labels = kind, name, help, tuple(labels)
        self.values: dict[Labels, float] = {}

    def set(self, value: float, *labels: str) -> None:
        """Sets a gauge, or a counter that is counted elsewhere."""
        self.values[labels] = value

    def add(self, amount: float = 1, *labels: str) -> None:
        """Adds to a counter or a gauge."""
        self.values[labels] = self.values.get(labels, 0) + amount


class Histogram(Metric):
    """Values by size.

    Args:
        name: with its unit.
        help: a line for whoever reads it.
        bounds: upper bounds of the buckets, ascending; there is one more without a bound.
    """

    def __init__(self, name: str, help: str, bounds: Sequence[float]) -> None:
        super().__init__(MetricKind.HISTOGRAM, name, help)
        self.bounds = tuple(bounds)
        self._counts = [0] * (len(self.bounds) + 1)
        self._total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Counts a value.

        Args:
            value: in the name's unit.
            times: how often.
        """
        self._counts[bisect_left(self.bounds, value)] += times
        self._total += value * times

    @property
    def distribution(self) -> Distribution:
        """What was observed so far."""
        return Distribution(tuple(self._counts), self._total)


class Registry:
    """All metrics of a process, in the order in which they were made."""

    def __init__(self) -> None:
        self._metrics: dict[str, Metric] = {}

    def __iter__(self) -> Iterator[Metric]:
        return iter(self._metrics.values())

    def counter(self, name: str, help: str, *labels: str) -> Metric:
        """A number that only grows; see `Metric`."""
        return self._keep(Metric(MetricKind.COUNTER, name, help, labels))

    def gauge(self, name: str, help: str, *labels: str) -> Metric:
        """A number that comes and goes; see `Metric`."""
        return self._keep(Metric(MetricKind.GAUGE, name, help, labels))

    def histogram(self, name: str, help: str, bounds: Sequence[float]) -> Histogram:
        """Values by size; see `Histogram`."""
        made = Histogram(name, help, bounds)
        self._keep(made)
        return made

    def _keep(self, metric: Metric) -> Metric:
        assert metric.name not in self._metrics, f"{metric.name} is there already"
        self._metrics[metric.name] = metric
        return metric
