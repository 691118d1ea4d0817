"""What the user asks of a server, beside its engine. Knows names, defaults and kinds; knows no HTTP."""

from dataclasses import dataclass

from kvspan.config.options import (
    BYTES,
    SECONDS,
    SWITCH,
    TEXT,
    OptionGroup,
    choice,
    option,
    options_of,
    seconds,
    several,
    whole,
)

_SERVER, _LIMITS, _FAULTS = OptionGroup.SERVER, OptionGroup.LIMITS, OptionGroup.FAULTS

LEAST_SILENCE_S = 2.0
"""Some beats of an engine's heart (`engine.heartbeat.BEAT_S`): after less, every one would be killed."""

_STYLES = ("hermes", "qwen3_coder", "llama3_json", "deepseek_v3", "kimi_k2")
_STYLES_ELSEWHERE = {
    "qwen3_xml": "qwen3_coder",
    "llama4_json": "llama3_json",
    "deepseek_v31": "deepseek_v3",
}
_THOUGHTS_ELSEWHERE = dict.fromkeys(("kimi_k2", "deepseek_v3", "glm45"), "qwen3")


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """What was asked. However it is made, every value has been read and checked by its kind.

    Raises:
        ConfigError: a value is not one that its option takes.
    """

    host: str = option(TEXT, "127.0.0.1", "address to listen on; 0.0.0.0 is every one", _SERVER)
    port: int = option(whole(0, 65535), 8000, "port to listen on; 0 takes a free one", _SERVER)
    api_key: tuple[str, ...] = option(
        several("KEY"),
        (),
        "a key that clients must send, or several with commas; KVSPAN_API_KEY does the same",
        _SERVER,
    )
    served_model_name: tuple[str, ...] = option(
        several("NAME"),
        (),
        "the model's name for clients, or several with commas; --model always is one",
        _SERVER,
    )
    chat_template: str | None = option(
        TEXT,
        None,
        "a file with a Jinja template instead of the model's own",
        _SERVER,
        unsaid="the model's",
    )
    trust_request_chat_template: bool = option(
        SWITCH,
        False,
        "run chat templates that requests bring; they are programs, and may take all time and memory",
        _SERVER,
    )
    tool_call_parser: str = option(
        choice("auto", *_STYLES, aliases=_STYLES_ELSEWHERE),
        "auto",
        "style in which the model writes tool calls; auto looks at its chat template",
        _SERVER,
    )
    reasoning_parser: str = option(
        choice("auto", "none", "deepseek_r1", "qwen3", "seed_oss", aliases=_THOUGHTS_ELSEWHERE),
        "auto",
        "how the model marks its thoughts; auto looks at its chat template",
        _SERVER,
    )
    enable_auto_tool_choice: bool = option(
        SWITCH, True, "look for tool calls where a request has tools and leaves the choice", _SERVER
    )
    allowed_origins: tuple[str, ...] = option(
        several("ORIGIN"),
        (),
        "web pages that may call the server (CORS), with commas; * is all",
        _SERVER,
    )
    root_path: str | None = option(
        TEXT, None, "path under which a reverse proxy serves this server", _SERVER, unsaid="none"
    )
    access_log: bool = option(SWITCH, False, "log every request", _SERVER)

    otlp_traces_endpoint: str | None = option(
        TEXT,
        None,
        "where spans of requests go by OpenTelemetry's protocol over HTTP, e.g. "
        "http://localhost:4318/v1/traces (pip install 'kvspan[otel]')",
        _SERVER,
        unsaid="none are made",
    )
    profile_steps: bool = option(
        SWITCH,
        False,
        "take one step in ten seconds apart, for /metrics; it costs all steps some percent",
        _SERVER,
    )

    max_queue: int = option(
        whole(0), 1024, "outputs that may wait for a place; more are refused with 429", _LIMITS
    )
    max_body_size: int = option(BYTES, 32 << 20, "bytes of a request's body at the most", _LIMITS)
    header_timeout: float = option(
        SECONDS, 10.0, "seconds that a client gets to send a request's headers", _LIMITS
    )
    body_timeout: float = option(
        SECONDS, 60.0, "seconds that a client gets to send a request's body", _LIMITS
    )
    idle_timeout: float = option(
        SECONDS, 75.0, "seconds after which a connection without a request is closed", _LIMITS
    )

    restart: bool = option(SWITCH, True, "start lost ranks again, and a lost engine", _FAULTS)
    max_restarts: int = option(whole(1), 3, "how often within ten minutes", _FAULTS)
    engine_timeout: float = option(
        seconds(LEAST_SILENCE_S),
        60.0,
        "seconds without a sign of life after which an engine's process counts as hung; a long step is "
        "no silence",
        _FAULTS,
    )
    drain_timeout: float | None = option(
        SECONDS,
        None,
        "seconds that requests get to finish after SIGTERM",
        _FAULTS,
        unsaid="as long as they need",
    )

    def __post_init__(self) -> None:
        for each in SERVER_OPTIONS:
            # The one write: a value comes in as the user spelled it and is kept as its kind reads it.
            object.__setattr__(self, each.name, each.read(vars(self)[each.name]))

    @property
    def restarts(self) -> int:
        """How often lost ranks are started again within ten minutes; 0 = never."""
        return self.max_restarts if self.restart else 0


SERVER_OPTIONS = options_of(ServerConfig)
"""The table that the fields of `ServerConfig` make."""
