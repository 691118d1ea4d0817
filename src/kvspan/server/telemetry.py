"""A span for each request, sent by OpenTelemetry's protocol; its attributes are those of vLLM.

A span is made when its request has ended, from times that were kept anyway, and is sent by a thread of
the library; so it costs no token anything. Knows requests that have ended. Knows no routes.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from fastapi import Request

from kvspan.clock import unix_s
from kvspan.engine.observer import EndedRequest
from kvspan.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

SPAN = "llm_request"

_HEADERS = ("traceparent", "tracestate")
_FLAG = "--otlp-traces-endpoint"
_NS = 1_000_000_000


def trace_headers(request: Request) -> dict[str, str]:
    """Of a call's headers, those that say what trace it belongs to."""
    return {name: request.headers[name] for name in _HEADERS if name in request.headers}


class Traces:
    """Fulfils `engine.observer.Observer`.

    Args:
        provider: takes spans, and sends them.
    """

    def __init__(self, provider: "TracerProvider") -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("kvspan")

    def ended(self, request: EndedRequest) -> None:
        """Makes the span of a request."""
        from opentelemetry.trace import SpanKind, Status, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        end_s = unix_s()
        start_s = end_s - (request.ended_s - request.timings[0].arrived_s)
        span = self._tracer.start_span(
            SPAN,
            context=TraceContextTextMapPropagator().extract(request.trace_headers),
            kind=SpanKind.SERVER,
            start_time=int(start_s * _NS),
            attributes=dict(_attributes(request)),
        )
        if request.error is not None:
            span.set_status(Status(StatusCode.ERROR, str(request.error)))
        span.end(int(end_s * _NS))

    def close(self) -> None:
        """Sends what is left; may take some seconds."""
        self._provider.shutdown()


def open_traces(endpoint: str) -> Traces:
    """Traces that go to a collector.

    Args:
        endpoint: its URL.

    Raises:
        ConfigError: it is not one for the protocol over HTTP, or the packages are not there.
    """
    if not endpoint.startswith(("http://", "https://")):
        raise ConfigError(
            f"{_FLAG} {endpoint}: spans go over HTTP; give a URL like http://localhost:4318/v1/traces "
            "(port 4317 of collectors is gRPC's)."
        )
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import SERVICE_NAME, OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ConfigError(
            f"{_FLAG} needs OpenTelemetry, which is not installed: pip install 'kvspan[otel]'."
        ) from error
    named = Resource.create({SERVICE_NAME: "kvspan"}).merge(OTELResourceDetector().detect())
    provider = TracerProvider(resource=named)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint)))
    return Traces(provider)


def _attributes(request: EndedRequest) -> Iterator[tuple[str, str | int | float | list[str]]]:
    generation, timing = request.generation, request.timings[0]
    params, outputs = generation.params, generation.outputs.values()
    yield "gen_ai.response.model", request.model
    yield "gen_ai.request.id", generation.request_id
    yield "gen_ai.request.n", params.n
    yield "gen_ai.request.temperature", params.temperature
    yield "gen_ai.request.top_p", params.top_p
    if params.max_tokens is not None:
        yield "gen_ai.request.max_tokens", params.max_tokens
    yield "gen_ai.usage.num_sequences", len(outputs)
    yield "gen_ai.usage.prompt_tokens", len(generation.prompt_ids)
    yield "gen_ai.usage.cached_tokens", generation.num_cached_tokens
    yield "gen_ai.usage.completion_tokens", sum(output.num_tokens for output in outputs)
    yield "gen_ai.response.finish_reasons", [str(output.finish_reason) for output in outputs]
    yield "gen_ai.latency.e2e", request.ended_s - timing.arrived_s
    if timing.began_s is not None:
        yield "gen_ai.latency.time_in_queue", timing.began_s - timing.arrived_s
        yield "gen_ai.latency.time_in_model_inference", request.ended_s - timing.began_s
    if timing.began_s is not None and timing.first_s is not None:
        yield "gen_ai.latency.time_to_first_token", timing.first_s - timing.arrived_s
        yield "gen_ai.latency.time_in_model_prefill", timing.first_s - timing.began_s
        yield "gen_ai.latency.time_in_model_decode", timing.last_s - timing.first_s
