"""From options to a server that serves: starts the engine, listens, drains, ends.

The first SIGTERM or SIGINT lets requests finish and takes no new ones; the second ends them.
"""

import asyncio
import contextlib
import gc
import logging
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import uvicorn

from kvspan.config.engine import EngineConfig
from kvspan.config.resolved import Resolved
from kvspan.config.server import ServerConfig
from kvspan.engine.async_llm import AsyncLLM
from kvspan.engine.messages import Ready
from kvspan.loading.chat_template import read_chat_template
from kvspan.loading.tokenizer import Tokenizer
from kvspan.server.address import bound, listen
from kvspan.server.app import create_app
from kvspan.server.http import TimedProtocol
from kvspan.server.served import Served, all_names
from kvspan.server.styles import Styles
from kvspan.server.telemetry import open_traces

logger = logging.getLogger("kvspan.server")

_LOOK_S = 0.1  # between looks at whether everything has finished


def serve(
    engine: EngineConfig,
    config: ServerConfig,
    *,
    chosen: Callable[[Resolved], None],
    listening: Callable[[str, Ready, Served], None],
) -> int:
    """Serves until it is told to end.

    Args:
        engine: options of the engine.
        config: options of the server.
        chosen: called with what will run, before it is started.
        listening: called when requests are taken, with the base URL, what the ranks report and
            what is served.

    Returns:
        0 after a signal; 1 if the engine was lost for good.

    Raises:
        ConfigError: it cannot run as asked, or the address is taken.
        ModelError: the model cannot be found or read.
    """
    template = None if config.chat_template is None else read_chat_template(Path(config.chat_template))
    with bound(config) as sock, uvloop_runner() as runner:
        return runner.run(_serve(engine, config, template, sock, chosen, listening))


def uvloop_runner() -> asyncio.Runner:
    """A runner on uvloop, which writes to many connections for less than the standard loop."""
    import uvloop

    return asyncio.Runner(loop_factory=uvloop.new_event_loop)


async def _serve(
    engine: EngineConfig,
    config: ServerConfig,
    template: str | None,
    sock: socket.socket,
    chosen: Callable[[Resolved], None],
    listening: Callable[[str, Ready, Served], None],
) -> int:
    traces = None if config.otlp_traces_endpoint is None else open_traces(config.otlp_traces_endpoint)
    llm = AsyncLLM.from_config(
        engine,
        max_restarts=config.restarts,
        engine_timeout_s=config.engine_timeout,
        profile=config.profile_steps,
        observer=traces,
    )
    try:
        ready = await llm.start(chosen)
        served = _served(llm, engine.model, config, template)
        server = DrainingServer(served)
        listen(sock, config, server.config.backlog)
        host, port = sock.getsockname()[:2]
        listening(f"http://{f'[{host}]' if ':' in host else host}:{port}", ready, served)
        gc.freeze()  # what is there will stay: to go through it would stop all streams
        await server.serve(sockets=[sock])
        return int(llm.health.gone)
    finally:
        await llm.shutdown()
        if traces is not None:
            await asyncio.to_thread(traces.close)


def _served(llm: AsyncLLM, model: str, config: ServerConfig, template: str | None) -> Served:
    """What routes are given of an engine that has been started."""
    tokenizer = llm.tokenizer
    if tokenizer is not None and template is not None:
        where = f"--chat-template {config.chat_template}"
        tokenizer = tokenizer.with_chat_template(template, where=where)
    return Served(
        llm=llm,
        names=all_names(model, config.served_model_name),
        config=config,
        styles=_styles(llm, config, tokenizer),
        tokenizer=tokenizer,
    )


class DrainingServer(uvicorn.Server):
    """Ends in two steps: no new requests, and when the last one is done, no connections.

    Args:
        served: the model.
    """

    def __init__(self, served: Served) -> None:
        config = served.config
        super().__init__(
            uvicorn.Config(
                create_app(served),
                http=TimedProtocol.with_limits(config),
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=config.access_log,
                server_header=False,
                backlog=4096,
                timeout_keep_alive=int(config.idle_timeout),
                timeout_graceful_shutdown=2,
            )
        )
        self._served = served
        self._ending: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handles SIGINT and SIGTERM while it serves."""
        before = {s: signal.signal(s, self.handle_exit) for s in (signal.SIGINT, signal.SIGTERM)}
        watch = asyncio.get_running_loop().create_task(self._end_with_engine())
        try:
            yield
        finally:
            watch.cancel()
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002
        """Drains at the first signal, and ends at the second."""
        loop = asyncio.get_running_loop()
        if not self._served.draining:
            self._served.draining = True
            loop.call_soon_threadsafe(self._drain)
        elif not self.force_exit:
            self.should_exit = self.force_exit = True
            loop.call_soon_threadsafe(self._tell, "Ending: %d request(s) are cut off.")

    def _tell(self, sentence: str) -> None:
        """What whoever reads the log has to know; not in a handler, which may interrupt a line."""
        logger.warning(sentence, self._served.llm.num_unfinished)

    def _drain(self) -> None:
        self._tell("Draining: %d request(s) running; Ctrl-C again ends them.")
        self._ending = asyncio.get_running_loop().create_task(self._end_when_idle())

    async def _end_when_idle(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._served.config.drain_timeout):
                while self._served.llm.num_unfinished:
                    await asyncio.sleep(_LOOK_S)
        self.should_exit = True

    async def _end_with_engine(self) -> None:
        while not self._served.llm.health.gone:
            await asyncio.sleep(_LOOK_S)
        self.should_exit = True


def _styles(llm: AsyncLLM, config: ServerConfig, tokenizer: Tokenizer | None) -> Styles:
    return Styles.of(
        tool_call_parser=config.tool_call_parser,
        reasoning_parser=config.reasoning_parser,
        chat_template=tokenizer.chat_template_source if tokenizer else "",
        architecture=llm.resolved.model_config.architecture,
        shows_tools=tokenizer is None or tokenizer.chat_template_reading.shows_tools,
    )
