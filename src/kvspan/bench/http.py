"""Replays a trace against any server that streams OpenAI's completions of prompts given as token ids.

Knows HTTP and server-sent events. What a server tells about itself is read in `bench.scrape`.
"""

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgspec

from kvspan.bench.record import Observed, Record
from kvspan.bench.schedule import Due, Schedule
from kvspan.bench.scrape import Scraper
from kvspan.clock import WallClock
from kvspan.errors import ConfigError
from kvspan.trace.row import Trace
from kvspan.trace.tokens import TokenSource

CONNECT_TIMEOUT_S = 10.0
_LEAD_S = 0.25  # before it is due, a request is made ready
_TICK_S = 0.2  # how often whoever watches is told
_ERROR_CHARS = 300  # of a server's answer that go into a sentence


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """Where requests go.

    Args:
        url: of the server, with or without `/v1`.
        model: its name there; None = the first that the server lists.
        api_key: sent as a bearer token, if there is one.
        extra_body: merged into each request; null takes a key out.
        timeout_s: for a whole answer.
        metrics_url: where to look for metrics; None = `/metrics` of the server.
    """

    url: str
    model: str | None = None
    api_key: str | None = None
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    timeout_s: float = 3600.0
    metrics_url: str | None = None

    @property
    def root(self) -> str:
        """The URL without `/v1`."""
        return self.url.rstrip("/").removesuffix("/v1").rstrip("/")


Told = Callable[[Observed, float], None]
"""Called now and then with what was observed so far, and the seconds since the start."""


class HttpReplay:
    """A replay under way; what it has observed is there at any time.

    Args:
        server: where requests go.
        trace: the rows.
        schedule: says which is sent when.
        vocab_size: of the model, to make prompts of.
        users: of a closed loop, to tell when each has been answered once.
        seed: of prompts.
        stop_s: seconds after which nothing more is sent, and what runs is cancelled.
        told: e.g. draws a progress bar.
    """

    def __init__(
        self,
        server: Server,
        trace: Trace,
        schedule: Schedule,
        *,
        vocab_size: int,
        users: int = 0,
        seed: int = 0,
        stop_s: float = float("inf"),
        told: Told = lambda *_: None,
    ) -> None:
        self._server, self._trace, self._schedule = server, trace, schedule
        self._tokens = TokenSource(trace, vocab_size=vocab_size, seed=seed)
        self._users, self._stop_s, self._told = users, stop_s, told
        self._clock = WallClock()
        self._start_s = self._clock.now_s()
        self._num_ended = 0
        self.observed = Observed()

    def run(self) -> Observed:
        """Replays the trace; Ctrl-C ends it, and what was measured by then is returned.

        Raises:
            ConfigError: nobody answers at the URL, or with no list of models.
        """
        try:
            asyncio.run(self._run())
        except KeyboardInterrupt:
            self.observed.interrupted = True
        self.observed.end_s = self._now_s()
        return self.observed

    async def _run(self) -> None:
        timeout = httpx.Timeout(self._server.timeout_s, connect=CONNECT_TIMEOUT_S)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        key = self._server.api_key
        headers = {"Authorization": f"Bearer {key}"} if key is not None else {}
        async with httpx.AsyncClient(timeout=timeout, limits=limits, headers=headers) as client:
            model = self._server.model or await first_model(client, self._server.root)
            scraper = Scraper(client, self._server.metrics_url or f"{self._server.root}/metrics")
            await scraper.begin()
            self._start_s = self._clock.now_s()
            watch = asyncio.create_task(self._watch(scraper))
            try:
                await self._send_all(client, model)
            finally:
                watch.cancel()
                self.observed.preemptions = await scraper.end()

    async def _send_all(self, client: httpx.AsyncClient, model: str) -> None:
        """Sends each request when it is due, until all are answered or time is up."""
        under_way: set[asyncio.Task[None]] = set()
        try:
            while (now_s := self._now_s()) < self._stop_s:
                for due in self._schedule.take(now_s + _LEAD_S):
                    under_way.add(asyncio.create_task(self._send(client, model, due)))
                if self._schedule.drained and self.observed.drained_s is None:
                    self.observed.drained_s = now_s
                next_s = self._schedule.next_s()
                if next_s is None and not under_way:
                    return
                wake_s = self._stop_s if next_s is None else min(self._stop_s, next_s - _LEAD_S)
                under_way = await _wait(under_way, None if wake_s == float("inf") else wake_s - now_s)
        finally:
            for task in under_way:
                task.cancel()
            await asyncio.gather(*under_way, return_exceptions=True)

    async def _send(self, client: httpx.AsyncClient, model: str, due: Due) -> None:
        row = self._trace.rows[due.index]
        body = request_body(
            model=model,
            prompt=self._tokens.prompt(due.index).tolist(),
            max_tokens=row.output_length,
            extra=self._server.extra_body,
        )
        content = msgspec.json.encode(body)
        await asyncio.sleep(due.due_s - self._now_s())
        record = Record(
            index=due.index, input_tokens=row.input_length, due_s=due.due_s, sent_s=self._now_s()
        )
        self.observed.records.append(record)
        try:
            await self._receive(client, content, record)
        except (httpx.HTTPError, ValueError) as error:
            record.error = str(error) or type(error).__name__
        record.end_s = self._now_s()
        self._num_ended += 1
        if self._num_ended == self._users:
            self.observed.filled_s = record.end_s
        self._schedule.ended(due.index, record.end_s)

    async def _receive(self, client: httpx.AsyncClient, content: bytes, record: Record) -> None:
        """Reads one answer.

        Raises:
            ValueError: the server refused, broke off, or answered with no stream of completions.
            HTTPError: the connection failed.
        """
        url, headers = f"{self._server.root}/v1/completions", {"Content-Type": "application/json"}
        async with client.stream("POST", url, content=content, headers=headers) as response:
            if response.status_code != httpx.codes.OK:
                text = (await response.aread()).decode(errors="replace")
                raise ValueError(f"HTTP {response.status_code}: {_message(text)}")
            async for line in response.aiter_lines():
                if (data := line.removeprefix("data:").strip()) == line or not data:
                    continue  # an event's other fields, comments, blank lines
                if data == "[DONE]":
                    break
                _take(data, record, self._now_s())
        if not record.arrivals_s:
            raise ValueError("The answer held no token.")

    async def _watch(self, scraper: Scraper) -> None:
        while True:
            if (sample := await scraper.sample(self._now_s())) is not None:
                self.observed.samples.append(sample)
            self._told(self.observed, self._now_s())
            await asyncio.sleep(_TICK_S)

    def _now_s(self) -> float:
        return self._clock.now_s() - self._start_s


def request_body(
    *, model: str, prompt: list[int], max_tokens: int, extra: Mapping[str, Any]
) -> dict[str, Any]:
    """What is posted: greedy, exactly as many tokens as the trace says, streamed, with usage at the end.

    Args:
        model: its name at the server.
        prompt: token ids.
        max_tokens: tokens to answer with.
        extra: merged over it; a None takes a key out, e.g. `ignore_eos` for a server that refuses it.
    """
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    } | dict(extra)
    return {key: value for key, value in body.items() if value is not None}


async def first_model(client: httpx.AsyncClient, root: str) -> str:
    """The first model that a server lists.

    Raises:
        ConfigError: it cannot be reached, or lists none.
    """
    url = f"{root}/v1/models"
    try:
        answer = await client.get(url)
        answer.raise_for_status()
        return str(msgspec.json.decode(answer.content)["data"][0]["id"])
    except (
        httpx.HTTPError,
        httpx.InvalidURL,
        OverflowError,
        ExceptionGroup,
    ) as error:  # ports over 65535
        why = str(error.exceptions[0] if isinstance(error, ExceptionGroup) else error).rstrip(".")
        raise ConfigError(
            f"--url: {url} does not answer: {why}. A server that runs is meant, like "
            "http://localhost:8000."
        ) from None
    except (msgspec.DecodeError, LookupError, TypeError):
        raise ConfigError(f"--url: {url} lists no model; name one with --served-model-name.") from None


async def _wait(tasks: set[asyncio.Task[None]], timeout_s: float | None) -> set[asyncio.Task[None]]:
    """Waits until a task ends or time passes; the tasks that go on. A broken task breaks the replay."""
    if not tasks:
        await asyncio.sleep(max(timeout_s or 0.0, 0.0))
        return tasks
    ended, going_on = await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    for task in ended:
        task.result()
    return going_on


def _take(data: str, record: Record, now_s: float) -> None:
    """Notes what one event of a stream holds.

    Raises:
        ValueError: it is an error, or no completion.
    """
    event = msgspec.json.decode(data)
    if not isinstance(event, dict) or "error" in event:
        raise ValueError(f"The stream broke off: {_message(data)}")
    if event.get("choices"):
        record.add(now_s, 1)
    if isinstance(usage := event.get("usage"), dict) and not event.get("choices"):
        record.set_output_tokens(int(usage.get("completion_tokens") or record.output_tokens))
        details = usage.get("prompt_tokens_details")
        if isinstance(details, dict) and details.get("cached_tokens") is not None:
            record.cached_tokens = int(details["cached_tokens"])


def _message(text: str) -> str:
    """The sentence in an OpenAI-shaped error, else the beginning of the text."""
    with contextlib.suppress(msgspec.DecodeError, LookupError, TypeError):
        text = str(msgspec.json.decode(text)["error"]["message"])
    return " ".join(text.split())[:_ERROR_CHARS]
