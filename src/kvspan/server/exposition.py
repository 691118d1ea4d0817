"""Metrics in the format of Prometheus. Knows metrics and the client library."""

from collections.abc import Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from kvspan.metrics import Histogram, Metric, MetricKind, Registry


def exposition(registry: Registry) -> bytes:
    """All metrics as text.

    Args:
        registry: of them.
    """
    collectors = CollectorRegistry(auto_describe=False)
    collectors.register(_Adapter(registry))
    return generate_latest(collectors)


class _Adapter(Collector):
    """Shows metrics to the client library."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Family]:
        for metric in self._registry:
            yield _family(metric)

    def describe(self) -> Iterator[Family]:
        return iter(())


def _family(metric: Metric) -> Family:
    if isinstance(metric, Histogram):
        spread = metric.distribution
        edges = [*map(str, metric.bounds), "+Inf"]
        histogram = HistogramMetricFamily(metric.name, metric.help)
        histogram.add_metric([], list(zip(edges, accumulate(spread.counts), strict=True)), spread.total)
        return histogram
    kind = CounterMetricFamily if metric.kind is MetricKind.COUNTER else GaugeMetricFamily
    family = kind(metric.name, metric.help, labels=metric.labels)
    for labels, value in metric.values.items():
        family.add_metric(list(labels), value)
    return family
