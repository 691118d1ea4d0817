"""A server that streams completions with known delays, as any OpenAI-compatible one does."""

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

MODELS = {"object": "list", "data": [{"id": "fake", "object": "model"}]}


@dataclass(slots=True)
class FakeServer:
    """What it does with each request.

    Args:
        first_s: until the first token.
        next_s: from one token to the next.
        tokens_per_event: that one event holds.
        refuse: prompts of this many tokens get a 400.
        break_off: prompts of this many tokens get an error after the first token.
        metrics: what `/metrics` answers; None = 404.
        bodies: of the requests that came.
    """

    first_s: float = 0.0
    next_s: float = 0.0
    tokens_per_event: int = 1
    refuse: int | None = None
    break_off: int | None = None
    metrics: str | None = None
    models: Any = field(default_factory=lambda: MODELS)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    url: str = ""

    @contextmanager
    def running(self) -> Iterator["FakeServer"]:
        """Serves from a thread of its own."""
        ready, loop = threading.Event(), asyncio.new_event_loop()
        thread = threading.Thread(target=self._serve, args=(loop, ready))
        thread.start()
        ready.wait(10)
        try:
            yield self
        finally:
            loop.call_soon_threadsafe(loop.stop)
            thread.join(10)

    def _serve(self, loop: asyncio.AbstractEventLoop, ready: threading.Event) -> None:
        server = loop.run_until_complete(asyncio.start_server(self._answer, "127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        ready.set()
        loop.run_forever()
        server.close()
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0.05))
        loop.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            length = next((int(line.split(":")[1]) for line in head.lower().split("\r\n")
                           if line.startswith("content-length")), 0)  # fmt: skip
            body = await reader.readexactly(length)
            path = head.split(" ")[1]
            if path == "/v1/models":
                _whole(writer, 200, json.dumps(self.models))
            elif path == "/metrics":
                _whole(writer, 404 if self.metrics is None else 200, self.metrics or "none")
            else:
                await self._complete(writer, json.loads(body))
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def _complete(self, writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
        self.bodies.append(body)
        num_prompt, left = len(body["prompt"]), body["max_tokens"]
        if num_prompt == self.refuse:
            _whole(writer, 400, json.dumps({"error": {"message": "The prompt is too long."}}))
            return
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n")
        await asyncio.sleep(self.first_s)
        while left > 0:
            left -= self.tokens_per_event
            _event(writer, {"choices": [{"index": 0, "text": "x"}], "usage": None})
            await writer.drain()
            if num_prompt == self.break_off:
                _event(writer, {"error": {"message": "A rank died."}})
                return
            if left > 0:
                await asyncio.sleep(self.next_s)
        usage = {
            "completion_tokens": body["max_tokens"],
            "prompt_tokens_details": {"cached_tokens": num_prompt // 2},
        }
        _event(writer, {"choices": [], "usage": usage})
        writer.write(b"data: [DONE]\n\n")


def _event(writer: asyncio.StreamWriter, content: dict[str, Any]) -> None:
    writer.write(f"data: {json.dumps(content)}\n\n".encode())


def _whole(writer: asyncio.StreamWriter, status: int, body: str) -> None:
    head = f"HTTP/1.1 {status} X\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    writer.write((head + body).encode())
