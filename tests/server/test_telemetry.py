"""Spans of requests: what they say, and that they arrive at a collector."""

import gzip
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from kvspan.errors import ConfigError
from kvspan.server.telemetry import open_traces
from tests.server.conftest import MODEL, serving

pytest.importorskip("opentelemetry.sdk", reason="pip install 'kvspan[otel]'")
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Collector(HTTPServer):
    """Keeps the spans that it is sent."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.spans: list[Any] = []
        self.resources: list[Any] = []
        self.came = threading.Event()


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        body = self.rfile.read(int(self.headers["Content-Length"]))
        collector: Any = self.server
        sent = ExportTraceServiceRequest.FromString(_plain(body, self.headers))
        for of_resource in sent.resource_spans:
            collector.resources.append(of_resource.resource)
            collector.spans += [span for scope in of_resource.scope_spans for span in scope.spans]
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()
        collector.came.set()

    def log_message(self, *_: object) -> None: ...


def _plain(body: bytes, headers: Any) -> bytes:
    return gzip.decompress(body) if headers.get("Content-Encoding") == "gzip" else body


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def attributes(span: Any) -> dict[str, Any]:
    def value(any_value: Any) -> Any:
        kind = any_value.WhichOneof("value")
        found = getattr(any_value, kind)
        return [value(each) for each in found.values] if kind == "array_value" else found

    return {each.key: value(each.value) for each in span.attributes}


@pytest.mark.timeout(90)
def test_each_request_is_a_span_at_the_collector(model: Path, collector: Collector) -> None:
    endpoint = f"http://127.0.0.1:{collector.server_port}/v1/traces"
    with serving(model, "--otlp-traces-endpoint", endpoint) as server, server.http as client:
        asked = {"model": MODEL, "max_tokens": 5, "temperature": 0.5, "ignore_eos": True}
        body = asked | {"prompt": "hello", "n": 2}
        assert client.post("/v1/completions", json=body, headers={"traceparent": PARENT}).is_success
        chat = asked | {"messages": [{"role": "user", "content": "hi"}], "stream": True}
        assert client.post("/v1/chat/completions", json=chat).is_success
        assert client.post("/v1/completions", json={"prompt": ""}).status_code == 400
    completion, chatted = collector.spans  # what is left is sent before the server ends
    found = attributes(completion)
    assert completion.name == "llm_request"
    assert completion.trace_id.hex() == PARENT.split("-")[1]
    assert completion.parent_span_id.hex() == PARENT.split("-")[2]
    assert not chatted.parent_span_id
    assert found["gen_ai.usage.prompt_tokens"] == 5
    assert found["gen_ai.usage.completion_tokens"] == 10
    assert found["gen_ai.usage.num_sequences"] == found["gen_ai.request.n"] == 2
    assert found["gen_ai.request.temperature"] == 0.5
    assert found["gen_ai.response.finish_reasons"] == ["length", "length"]
    latencies = {name: found[f"gen_ai.latency.{name}"] for name in ("time_to_first_token", "e2e")}
    assert 0 < latencies["time_to_first_token"] < latencies["e2e"] < 60
    lasted_ns = completion.end_time_unix_nano - completion.start_time_unix_nano
    assert lasted_ns * 1e-9 == pytest.approx(latencies["e2e"], abs=1e-5)
    assert {"key": "service.name", "value": "kvspan"} in [
        {"key": each.key, "value": each.value.string_value} for each in collector.resources[0].attributes
    ]


def test_an_endpoint_of_another_protocol_is_refused() -> None:
    with pytest.raises(ConfigError, match="http://localhost:4318/v1/traces"):
        open_traces("grpc://localhost:4317")


def test_without_the_packages_there_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match=r"pip install 'kvspan\[otel\]'"):
        open_traces("http://localhost:4318/v1/traces")
