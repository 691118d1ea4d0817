"""What a server tells about itself at `/metrics`: ours by our names, and vLLM's by its own.

A server that tells nothing, or something else, is an ordinary server.
"""

from collections.abc import Iterable

import httpx
from prometheus_client.parser import text_string_to_metric_families

from kvspan.bench.record import Sample

_RUNNING = ("kvspan_num_requests_running", "vllm:num_requests_running")
_KV_SHARE = ("kvspan_kv_cache_usage_ratio", "vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
_PREEMPTIONS = ("kvspan_num_preemptions_total", "vllm:num_preemptions_total")
_OUTPUT = ("kvspan_generation_tokens_total", "vllm:generation_tokens_total")
_LOOKED_UP = ("kvspan_prefix_cache_queries_total", "vllm:prefix_cache_queries_total")
_FOUND = ("kvspan_prefix_cache_hits_total", "vllm:prefix_cache_hits_total")

Metrics = dict[str, list[float]]
"""Name -> the values of all its labels: ranks, replicas."""


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
            running=int(_total(now, _RUNNING) or 0),
            kv_used=_mean(now, _KV_SHARE),
            prefill_tokens=_prefilled(before, now),
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
    """Metrics by name; nothing if it is no page of metrics."""
    found: Metrics = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                found.setdefault(sample.name, []).append(sample.value)
    except ValueError:
        return {}
    return found


def _values(metrics: Metrics, names: Iterable[str]) -> list[float]:
    """Of the first name that is there."""
    return next((metrics[name] for name in names if name in metrics), [])


def _total(metrics: Metrics, names: Iterable[str]) -> float | None:
    values = _values(metrics, names)
    return sum(values) if values else None


def _mean(metrics: Metrics, names: Iterable[str]) -> float | None:
    values = _values(metrics, names)
    return sum(values) / len(values) if values else None


def _increase(before: Metrics, after: Metrics, names: Iterable[str]) -> int | None:
    end = _total(after, names)  # a counter may be there only once there was something to count
    return None if end is None else int(end - (_total(before, names) or 0))


def _prefilled(before: Metrics, after: Metrics) -> int | None:
    """Tokens of prompts that were looked up in the cache and not found."""
    asked, found = _increase(before, after, _LOOKED_UP), _increase(before, after, _FOUND)
    return None if asked is None or found is None else asked - found
