"""What is measured adds up, and what documents and dashboard speak of is measured."""

import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvspan.clock import VirtualClock
from kvspan.engine.meter import Meter
from kvspan.metrics import Registry
from kvspan.server.exposition import exposition
from tests.server.conftest import Running, serving

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("file", ["docs/serving.md", "deploy/grafana.json"])
def test_names_that_are_spoken_of_exist(file: str) -> None:
    registry = Registry()
    Meter(registry, VirtualClock())
    known = {metric.name for metric in registry}
    spoken = set(re.findall(r"kvspan_\w+", (ROOT / file).read_text(encoding="utf-8")))
    assert {name.removesuffix("_bucket") for name in spoken} <= known


def test_a_histogram_is_read_as_prometheus_means_it() -> None:
    registry = Registry()
    spread = registry.histogram("x_seconds", "help", (0.1, 1.0))
    for value in (0.05, 0.1, 0.5, 3.0):
        spread.observe(value)
    registry.counter("y_total", "help", "kind").add(2, 'a"b')
    families = {f.name: f for f in text_string_to_metric_families(exposition(registry).decode())}
    found = {(s.name, s.labels.get("le")): s.value for s in families["x_seconds"].samples}
    assert found["x_seconds_bucket", "0.1"] == 2
    assert found["x_seconds_bucket", "1.0"] == 3
    assert found["x_seconds_bucket", "+Inf"] == found["x_seconds_count", None] == 4
    assert found["x_seconds_sum", None] == pytest.approx(3.65)
    (sample,) = families["y"].samples
    assert (sample.labels, sample.value) == ({"kind": 'a"b'}, 2)


def test_every_way_to_end_is_there_before_anything_has_ended() -> None:
    registry = Registry()
    Meter(registry, VirtualClock())
    text = exposition(registry).decode()
    for reason in ("stop", "length", "abort", "error"):
        assert f'kvspan_request_success_total{{finished_reason="{reason}"}} 0.0' in text


def test_an_engine_that_has_made_no_step_is_seen(model: Path) -> None:
    with serving(model) as idle:
        for name in ("kvspan_num_requests_running", "kvspan_num_preemptions_total"):
            assert idle.sample(f'{name}{{replica="0"}}') == 0
        assert idle.sample('kvspan_kv_used_tokens{rank="0",replica="0"}') == 0


def test_a_body_that_is_refused_for_a_later_prompt_counts_no_output(server: Running) -> None:
    ended = "kvspan_request_success_total", "kvspan_request_prompt_tokens_count"
    before = [server.metric(name) for name in ended]
    with server.http as client:
        refused = client.post("/v1/completions", json={"prompt": [[1, 2], [3], [500]], "n": 2})
    assert refused.status_code == 400
    assert "500" in refused.json()["error"]["message"]
    assert [server.metric(name) for name in ended] == before


def test_they_add_up(server: Running) -> None:
    names = (
        "kvspan_generation_tokens_total",
        "kvspan_prompt_tokens_total",
        "kvspan_request_success_total",
        "kvspan_time_to_first_token_seconds_count",
        "kvspan_inter_token_latency_seconds_count",
        "kvspan_requests_refused_total",
    )
    before = [server.metric(name) for name in names]
    with server.http as client:
        body = {"prompt": "abc", "n": 2, "max_tokens": 5, "ignore_eos": True}
        assert client.post("/v1/completions", json=body).status_code == 200
        assert client.post("/v1/completions", json={"prompt": ""}).status_code == 400
    grown = [server.metric(name) - old for name, old in zip(names, before, strict=True)]
    assert grown == [10, 6, 2, 2, 8, 1]
