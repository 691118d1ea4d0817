"""A replay over HTTP against a server whose delays are known."""

import _thread
import threading

import numpy as np
import pytest
from tests.unit.bench.fake_server import FakeServer

from kvspan.bench.figures import figures
from kvspan.bench.http import HttpReplay, Server
from kvspan.bench.record import Observed
from kvspan.bench.schedule import ClosedLoop, OpenLoop, Schedule
from kvspan.errors import ConfigError
from kvspan.trace.row import Trace, TraceRow

SLACK_MS = 25.0  # a loaded machine wakes sleepers late


def replay(fake: FakeServer, trace: Trace, schedule: Schedule, **options: object) -> Observed:
    with fake.running():
        return HttpReplay(Server(url=fake.url), trace, schedule, vocab_size=1000, **options).run()  # type: ignore[arg-type]


def rows(count: int, *, every_ms: float = 0.0, tokens: int = 4) -> Trace:
    return Trace(tuple(TraceRow(i * every_ms, 10 + i, tokens) for i in range(count)))


def test_known_delays_give_the_known_latencies() -> None:
    trace = rows(6, tokens=5)
    observed = replay(FakeServer(first_s=0.2, next_s=0.05), trace, ClosedLoop(trace, users=2), users=2)
    found = figures(observed, num_ranks=2)
    of_all = found.latencies
    assert (found.num_ok, found.num_errors, found.num_unfinished) == (6, 0, 0)
    assert of_all.ttft_ms is not None
    assert of_all.ttft_ms.p50 == pytest.approx(200, abs=SLACK_MS)
    assert of_all.tpot_ms is not None
    assert of_all.tpot_ms.p50 == pytest.approx(50, abs=SLACK_MS / 2)
    assert of_all.itl_ms is not None
    assert of_all.itl_ms.p50 == pytest.approx(50, abs=SLACK_MS / 2)
    assert of_all.e2e_ms is not None
    assert of_all.e2e_ms.p50 == pytest.approx(400, abs=2 * SLACK_MS)
    assert of_all.tokens_per_s_per_user == pytest.approx(1000 / of_all.tpot_ms.p50)
    assert found.output_tokens_per_s_per_rank == pytest.approx(found.output_tokens_per_s / 2)
    assert found.hit_rate == pytest.approx(0.5, abs=0.05)


def test_tokens_that_come_together_are_counted_by_usage() -> None:
    trace = rows(1, tokens=9)
    observed = replay(
        FakeServer(first_s=0.05, next_s=0.08, tokens_per_event=4), trace, ClosedLoop(trace, users=1)
    )
    (record,) = observed.records
    assert record.piece_tokens == [3, 3, 3]
    assert record.tpot_s == pytest.approx((record.arrivals_s[2] - record.arrivals_s[0]) / 6)


def test_an_open_loop_keeps_its_schedule() -> None:
    trace = rows(40, every_ms=40.0, tokens=1)
    observed = replay(FakeServer(), trace, OpenLoop(trace, speed_up=2.0))
    late_ms = [1000 * (record.sent_s - record.due_s) for record in observed.records]
    assert [record.due_s for record in observed.records] == pytest.approx(np.arange(40) * 0.02)
    assert min(late_ms) >= 0
    assert np.median(late_ms) < 5


def test_prompts_are_those_of_the_trace() -> None:
    trace = Trace((TraceRow(0, 20, 3, (1, 2)), TraceRow(0, 12, 1, (1, 9))), block_tokens=10)
    fake = FakeServer()
    replay(fake, trace, ClosedLoop(trace, users=1))
    one, two = fake.bodies
    assert (len(one["prompt"]), one["max_tokens"], one["model"]) == (20, 3, "fake")
    assert (one["ignore_eos"], one["stream_options"]) == (True, {"include_usage": True})
    assert one["prompt"][:10] == two["prompt"][:10]


def test_errors_are_counted_and_the_others_go_on() -> None:
    trace = rows(5)
    found = figures(
        replay(FakeServer(refuse=11, break_off=13), trace, ClosedLoop(trace, users=1)), num_ranks=1
    )
    assert (found.num_ok, found.num_errors) == (3, 2)
    assert found.errors == {
        "HTTP 400: The prompt is too long.": 1,
        "The stream broke off: A rank died.": 1,
    }


def test_a_server_that_is_not_there_is_refused() -> None:
    trace = rows(1)
    for url, says in (("http://127.0.0.1:9", "does not answer"), ("nonsense", "does not answer")):
        with pytest.raises(ConfigError, match=says):
            HttpReplay(Server(url=url), trace, ClosedLoop(trace, users=1), vocab_size=100).run()
    with FakeServer(models={"data": []}).running() as fake, pytest.raises(ConfigError, match="no model"):
        HttpReplay(Server(url=f"{fake.url}/v1"), trace, ClosedLoop(trace, users=1), vocab_size=100).run()


def test_time_that_is_up_leaves_requests_unfinished() -> None:
    trace = rows(3, tokens=100)
    observed = replay(FakeServer(next_s=0.05), trace, ClosedLoop(trace, users=2), stop_s=0.3)
    found = figures(observed, num_ranks=1)
    assert (found.num_ok, found.num_errors, found.num_unfinished) == (0, 0, 2)
    assert found.output_tokens_per_s > 0
    assert not found.interrupted


def test_an_interrupt_keeps_what_was_measured() -> None:
    trace = rows(4, tokens=100)
    fake, seen = FakeServer(next_s=0.02), threading.Event()

    def told(observed: Observed, _: float) -> None:
        if observed.records and observed.records[0].output_tokens > 2 and not seen.is_set():
            seen.set()
            _thread.interrupt_main()

    observed = replay(fake, trace, ClosedLoop(trace, users=2), told=told)
    assert observed.interrupted
    assert figures(observed, num_ranks=1).latencies.ttft_ms is not None


OURS = """# TYPE kvspan_num_requests_running gauge
kvspan_num_requests_running{replica="0"} 3
kvspan_kv_cache_usage_ratio{replica="0",rank="0"} 0.3
kvspan_kv_cache_usage_ratio{replica="0",rank="1"} 0.2
# TYPE kvspan_num_preemptions counter
kvspan_num_preemptions_total{replica="0"} 7
"""
VLLM = 'vllm:kv_cache_usage_perc{engine="0"} 0.5\nvllm:num_requests_running 2\n'


@pytest.mark.parametrize(
    ("metrics", "kv_used", "preemptions"),
    [(OURS, 0.25, 0), (VLLM, 0.5, None), ("<html>", None, None), (None, None, None)],
    ids=["kvspan", "vllm", "html", "none"],
)
def test_metrics_are_read_where_they_are(
    metrics: str | None, kv_used: float | None, preemptions: int | None
) -> None:
    trace = rows(2, tokens=3)
    observed = replay(FakeServer(next_s=0.1, metrics=metrics), trace, ClosedLoop(trace, users=1))
    found = figures(observed, num_ranks=1)
    assert found.engine.kv_used_max == kv_used
    assert found.engine.preemptions == preemptions
