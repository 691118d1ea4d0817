"""What a server tells about itself at `/metrics`: ours by our names, and vLLM's by its own.

A server that tells nothing, or something else, is an ordinary server.
"""

from collections.abc import Iterable

import httpx
from prometheus_client.parser import text_string_to_metric_families

from kvspan.bench.record import Sample

_RUNNING = ("kvspan_requests_running", "vllm:num_requests_running")
_KV_SHARE = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
_KV_USED, _KV_TOTAL = ("kvspan_kv_used_tokens",), ("kvspan_kv_capacity_tokens",)
_PREEMPTIONS = ("kvspan_preemptions_total", "vllm:num_preemptions_total")
_PREFILL = ("kvspan_prefill_tokens_total",)
_OUTPUT = ("kvspan_output_tokens_total", "vllm:generation_tokens_total")

Metrics = dict[str, float]
"""Name -> value, summed over labels."""


class Scraper:
    """Looks at a server's metrics from time to time.

    Args:
        client: what it asks with.
        url: of the metrics.
    """

    def __init__(self, client: httpx.AsyncClient, url: str) -> None:
        self._client, self._url = client, url
        self._first: Metrics = {}
        self._last: Metrics = {}
        self._last_s = 0.0

    async def begin(self) -> None:
        """Notes where the counters stand before the run."""
        self._first = self._last = await self._read()

    async def sample(self, now_s: float) -> Sample | None:
        """The time since the last look; None if the server does not tell.

        Args:
            now_s: seconds since the start of the run.
        """
        if not self._first:
            return None
        now, before = await self._read(), self._last
        start_s, self._last, self._last_s = self._last_s, now, now_s
        if not now:
            return None
        return Sample(
            start_s=start_s,
            lasts_s=now_s - start_s,
            running=int(_first_of(now, _RUNNING) or 0),
            kv_used=_kv_used(now),
            prefill_tokens=_increase(before, now, _PREFILL),
            output_tokens=_increase(before, now, _OUTPUT),
        )

    async def end(self) -> int | None:
        """Preemptions since `begin`; None if the server does not tell."""
        return _increase(self._first, await self._read(), _PREEMPTIONS) if self._first else None

    async def _read(self) -> Metrics:
        try:
            answer = await self._client.get(self._url)
        except (httpx.HTTPError, httpx.InvalidURL):
            return {}
        return parse(answer.text) if answer.status_code == httpx.codes.OK else {}


def parse(text: str) -> Metrics:
    """Metrics by name, summed over their labels; nothing if it is no page of metrics."""
    found: Metrics = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                found[sample.name] = found.get(sample.name, 0.0) + sample.value
    except ValueError:
        return {}
    return found


def _first_of(metrics: Metrics, names: Iterable[str]) -> float | None:
    return next((metrics[name] for name in names if name in metrics), None)


def _increase(before: Metrics, after: Metrics, names: Iterable[str]) -> int | None:
    start, end = _first_of(before, names), _first_of(after, names)
    return None if start is None or end is None else int(end - start)


def _kv_used(metrics: Metrics) -> float | None:
    used, total = _first_of(metrics, _KV_USED), _first_of(metrics, _KV_TOTAL)
    return used / total if used is not None and total else _first_of(metrics, _KV_SHARE)
