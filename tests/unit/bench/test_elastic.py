"""A span for each request beside its rivals: equal ranks and bytes, every request to one engine."""

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from tests.conftest import SEED

from kvspan.bench.answered import Bounds, answered
from kvspan.bench.elastic import CurvePoint, Home, Measured, best_exchange, measure
from kvspan.bench.elastic_report import (
    curve_plot,
    elastic_page,
    latency_table,
    speed_ratio,
    traffic_table,
    verdicts,
)
from kvspan.bench.elastic_traffic import Traffic
from kvspan.bench.figures import figures, latencies
from kvspan.bench.fleet import Shared, View
from kvspan.bench.record import Observed, Record
from kvspan.bench.rivals import ELASTIC, REPLICAS, STATIC, Plan, rivals, turns
from kvspan.bench.schedule import ClosedLoop
from kvspan.cli.bench_elastic import _alike, add_arguments
from kvspan.cli.flags import FlagParser
from kvspan.cli.main import main
from kvspan.testing.checkpoints import write_checkpoint
from kvspan.testing.tiny import tiny_llama
from kvspan.trace.row import Trace, TraceRow

OPTIONS = {"model": "m", "prefill_context_parallel_size": 2, "decode_context_parallel_size": 2}


def test_rivals_have_the_same_ranks() -> None:
    asked = {**OPTIONS, "dcp_span_threshold": 100, "comm": "gloo", "num_threads": 1}
    found = rivals(asked)
    assert [len(found[name]) for name in (REPLICAS, STATIC, ELASTIC)] == [2, 1, 1]
    assert found[REPLICAS][0]["prefill_context_parallel_size"] == 1
    assert found[REPLICAS][0]["num_threads"] == found[STATIC][0]["num_threads"] == 1
    assert "dcp_span_threshold" not in found[STATIC][0]
    assert found[ELASTIC][0] == {**asked, "dcp_mode": "elastic"}


def test_every_request_goes_to_the_engine_with_least_under_way() -> None:
    trace = Trace(tuple(TraceRow(i, length, 1) for i, length in enumerate((100, 10, 20, 30, 5))))
    shared = Shared(ClosedLoop(trace, users=3), trace, 2)
    first, second = View(shared, 0), View(shared, 1)
    assert [due.index for due in first.take(0.0)] == [0]
    assert [due.index for due in second.take(0.0)] == [1, 2]
    assert second.take(0.1) == []
    second.ended(1, 0.2)
    assert [due.index for due in second.take(0.2)] == [3]
    for index in (2, 3):
        second.ended(index, 0.3)
    assert not second.take(0.3)[1:]
    second.ended(4, 0.4)
    assert second.drained
    assert second.next_s() is not None  # the other one's user may ask again
    first.ended(0, 0.5)
    assert first.next_s() is None
    assert second.next_s() is None


def test_when_an_engine_has_failed_the_others_do_not_wait_for_its_answers() -> None:
    trace = Trace(tuple(TraceRow(i, 10, 1) for i in range(5)))
    shared = Shared(ClosedLoop(trace, users=2), trace, 2)
    first, second = View(shared, 0), View(shared, 1)
    assert [due.index for due in first.take(0.0)] == [0]
    assert [due.index for due in second.take(0.0)] == [1]
    shared.is_broken = True
    second.ended(1, 0.1)
    assert second.take(0.1) == []
    assert second.next_s() is None


def test_the_static_rival_runs_by_its_faster_exchange() -> None:
    def point(rival: str, exchange: str, tpot_ms: float) -> CurvePoint:
        return CurvePoint(
            rival=rival,
            layout="" if rival == REPLICAS else "-tp 2 -dcp 2",
            exchange=exchange,
            context=8,
            batch=2,
            tpot_ms=tpot_ms,
            p90_ms=tpot_ms,
            ratio=1.0,
            worst_ratio=1.0,
            exchange_share=1.0,
        )

    points = [point(STATIC, "a2a", 5), point(STATIC, "ag_rs", 3), point(ELASTIC, "a2a", 1)]
    assert best_exchange(points, "-tp 2 -dcp 2") == "ag_rs"
    assert best_exchange(points, "-pcp 2 -dcp 2") == best_exchange([], "") == "a2a"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("model")
    write_checkpoint(directory, tiny_llama(max_position_embeddings=4096), seed=SEED)
    return str(directory)


def small_plan(**changes: object) -> Plan:
    plan = Plan(
        contexts=(40, 400),
        batch=2,
        num_steps=3,
        num_rounds=1,
        traces=("short", "mixed"),
        num_rows=10,
        users=3,
        rate_per_s=None,
        scale=64,
        output_scale=64,
        cache_tokens=400,
        stop_s=60.0,
    )
    return replace(plan, **changes)  # type: ignore[arg-type]


def measured(model: str, plan: Plan, **options: object) -> Measured:
    asked = {**OPTIONS, "model": model, "num_threads": 1, "dcp_span_threshold": 100, **options}
    return measure([("-pcp 2 -dcp 2", asked)], plan)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [{}, {"prefill_context_parallel_size": 1, "tensor_parallel_size": 2}])
def test_rivals_are_measured_side_by_side(model: str, layout: dict[str, object]) -> None:
    found = measured(model, small_plan(), comm="shm", **layout)
    shares = {(p.context, p.rival): p.exchange_share for p in found.curve}
    assert shares[40, ELASTIC] == shares[40, REPLICAS] == shares[400, REPLICAS] == 0
    assert shares[400, ELASTIC] == shares[400, STATIC] == 1
    by_name = {(t.trace, t.rival): t for t in found.traffic}
    assert by_name["short", ELASTIC].exchange_steps == 0
    assert 0 < by_name["mixed", ELASTIC].exchange_share < 1
    for (trace, rival), traffic in by_name.items():
        lost = 10 - traffic.found.num_ok
        assert lost == traffic.found.num_errors
        assert lost == 0 or (trace, rival) == ("mixed", REPLICAS)
    assert by_name["mixed", REPLICAS].found.num_errors > 0  # 400 tokens hold no request of 512
    layout = found.homes[0].layout
    assert speed_ratio(found, "short", (ELASTIC, layout), (STATIC, layout)) > 0
    assert any("0.0% of its steps" in sentence for sentence in verdicts(found))
    assert "<svg" in elastic_page("t", "command", [found])
    assert msgspec.json.decode(msgspec.json.encode(found), type=Measured) == found


@pytest.mark.slow
def test_both_kinds_of_home_take_turns_beside_the_same_replicas(model: str) -> None:
    asked = {**OPTIONS, "model": model, "num_threads": 1, "dcp_span_threshold": 100, "comm": "shm"}
    columns = {**asked, "prefill_context_parallel_size": 1, "tensor_parallel_size": 2}
    layouts = [("-pcp 2 -dcp 2", asked), ("-tp 2 -dcp 2", columns)]
    found = measure(layouts, small_plan(contexts=(40,), traces=("short",)))
    order = [(p.rival, p.layout) for p in found.curve]
    assert list(dict.fromkeys(order)) == [
        (REPLICAS, ""),
        (STATIC, "-pcp 2 -dcp 2"),
        (ELASTIC, "-pcp 2 -dcp 2"),
        (STATIC, "-tp 2 -dcp 2"),
        (ELASTIC, "-tp 2 -dcp 2"),
    ]
    assert {(t.rival, t.layout): t.found.num_ok for t in found.traffic} == dict.fromkeys(order, 10)
    assert [row[0] for row in traffic_table(found, "short").rows][-1] == "elastic -tp 2 -dcp 2"
    assert len({line.color for line in curve_plot(found).lines}) == 5


@pytest.mark.slow
def test_at_a_rate_each_rival_is_asked_the_same_and_replicas_refuse_what_no_rank_holds(
    model: str,
) -> None:
    plan = small_plan(contexts=(), traces=("mixed",), rate_per_s=20.0)
    found = measured(model, plan, comm="shm")
    answered = {t.rival: t.found.num_ok for t in found.traffic}
    assert answered[STATIC] == answered[ELASTIC] == 10 > answered[REPLICAS]
    refused = {t.rival: t.refused_share for t in found.traffic}
    assert refused[STATIC] == refused[ELASTIC] == 0 < refused[REPLICAS] < 1
    assert any("replicas refused" in sentence for sentence in verdicts(found))


def record(index: int, due_s: float, first_s: float, last_s: float, num_tokens: int) -> Record:
    return Record(
        index=index,
        input_tokens=300 if index else 2000,
        due_s=due_s,
        sent_s=due_s,
        arrivals_s=[first_s, last_s],
        piece_tokens=[1, num_tokens - 1],
        end_s=last_s,
    )


LATE = Observed(
    records=[
        record(0, 0.0, 1.0, 20.0, 41),
        record(1, 1.0, 1.5, 2.0, 11),
        record(2, 8.0, 9.5, 10.0, 11),
        Record(index=3, input_tokens=9, due_s=9.0, sent_s=9.0, end_s=9.0, error="no room"),
    ],
    preemptions=1,
    drained_s=9.0,
    end_s=20.5,
)


def test_answers_count_until_the_last_of_them() -> None:
    found = answered(LATE, Bounds())
    assert found.lasts_s == 20.0
    assert found.output_tokens_per_s == pytest.approx(63 / 20)
    assert found.requests_per_s == found.good_requests_per_s == pytest.approx(3 / 20)
    assert found.tail_share == pytest.approx(11 / 20)


def test_goodput_counts_answers_that_came_in_time() -> None:
    def good(**bounds: float) -> float:
        return answered(LATE, Bounds(**bounds)).good_requests_per_s * 20

    assert good(ttft_s=1.0) == pytest.approx(2)
    assert good(tpot_s=0.1) == pytest.approx(2)
    assert good(ttft_s=1.0, tpot_s=0.1) == pytest.approx(1)
    assert good(ttft_s=0.1) == 0


def test_answers_that_were_cut_off_count_as_time_and_not_as_output() -> None:
    cut_off = Record(index=4, input_tokens=9, due_s=2.0, sent_s=2.0, arrivals_s=[3.0], piece_tokens=[1])
    found = answered(Observed(records=[*LATE.records, cut_off], end_s=40.0), Bounds())
    assert (found.lasts_s, found.output_tokens_per_s) == (40.0, pytest.approx(63 / 40))
    assert answered(Observed(), Bounds()).output_tokens_per_s == 0


def by_hand(**changes: object) -> Measured:
    """A trace replayed once by everybody, all alike but for what changes in elastic's answers."""

    def traffic(rival: str, layout: str) -> Traffic:
        its = answered(LATE, Bounds())
        if rival == ELASTIC:
            its = msgspec.structs.replace(its, **changes)
        long, short = (
            [r for r in LATE.records if (r.input_tokens > 999) == long] for long in (True, False)
        )
        return Traffic(
            rival=rival,
            layout=layout,
            trace="mixed",
            round=0,
            answered=its,
            found=figures(LATE, num_ranks=2),
            long=latencies(long, (0.0, 9.0)),
            short=latencies(short, (0.0, 9.0)),
            num_steps=10,
            exchange_steps=5,
            plain_step_ms=1.0,
            exchange_step_ms=2.0,
            spills=0,
            shared_steps=0,
            refused_share=0.25,
        )

    layout = "-pcp 2 -dcp 2"
    who = ((REPLICAS, ""), (STATIC, layout), (ELASTIC, layout))
    return Measured(
        homes=(Home(layout=layout, threshold=100, why="so", exchange="a2a"),),
        comm="shm",
        cache_tokens=400,
        curve=(),
        traffic=tuple(traffic(*each) for each in who),
    )


def test_a_long_tail_is_warned_of() -> None:
    assert any("raise --rows" in sentence for sentence in verdicts(by_hand()))
    found = by_hand()
    calm = [
        msgspec.structs.replace(t, answered=msgspec.structs.replace(t.answered, tail_share=0.1))
        for t in found.traffic
    ]
    found = msgspec.structs.replace(found, traffic=tuple(calm))
    assert not any("raise --rows" in sentence for sentence in verdicts(found))


def test_a_rival_is_judged_by_whole_answers_and_not_by_the_time_in_which_requests_came() -> None:
    found = by_hand(output_tokens_per_s=6.3)
    assert any("elastic gives 2.00 times the output of static" in said for said in verdicts(found))
    assert traffic_table(found, "mixed").note
    cells = {row[0]: row for row in traffic_table(found, "mixed").rows}
    columns = traffic_table(found, "mixed").columns
    assert cells[ELASTIC][columns.index("tok/s")] == "6.3"
    assert cells[STATIC][columns.index("refused")] == "1"
    assert cells[STATIC][columns.index("output refused")] == "25.0%"
    waits = {row[:2]: row[2:] for row in latency_table(found, "mixed").rows}
    assert waits[STATIC, "long"] == ("1", "1,000", "1,000", "475.0", "475.0")
    assert waits[STATIC, "short"][0] == "2"


def test_who_refused_is_said_before_ratios_of_what_was_answered() -> None:
    refused, ratio = verdicts(by_hand())[2:4]
    assert "elastic refused 1 request, 25.0% of the output asked for." in refused
    assert "counting only what was answered, elastic gives" in ratio
    found = by_hand()
    all_served = [
        msgspec.structs.replace(t, found=msgspec.structs.replace(t.found, num_errors=0))
        for t in found.traffic
    ]
    said = verdicts(msgspec.structs.replace(found, traffic=tuple(all_served)))
    assert said[0].startswith("mixed traffic over shm: elastic gives")
    assert not any("refused" in sentence for sentence in said)


def test_lengths_that_a_trace_has_not_are_not_shown() -> None:
    found = by_hand()
    none = latencies([], (0.0, 9.0))
    short = [msgspec.structs.replace(t, long=none) for t in found.traffic]
    some = [*short[:2], found.traffic[2]]
    shown = {row[1] for row in latency_table(found, "mixed").rows}
    assert shown == {"short", "long"}
    rows = latency_table(msgspec.structs.replace(found, traffic=tuple(short)), "mixed").rows
    assert [row[1] for row in rows] == ["short"] * 3
    rows = latency_table(msgspec.structs.replace(found, traffic=tuple(some)), "mixed").rows
    assert (REPLICAS, "long", "0", "-", "-", "-", "-") in rows  # who refused them is seen to


def test_layouts_of_as_many_ranks_share_replicas() -> None:
    parser = FlagParser()
    add_arguments(parser)
    layouts = ["-tp 2 -dcp 2", "-pcp 2 -dcp 2", "-tp 4 -dcp 2"]
    typed = [part for text in layouts for part in ("--layout", text)]
    alike = _alike(parser.parse_args(["m", "--over", "shm,gloo", *typed]))
    assert [[name for name, _ in its] for its in alike] == [layouts[:2]] * 2 + [layouts[2:]] * 2
    assert [its[0][1]["comm"] for its in alike] == ["shm", "gloo", "shm", "gloo"]
    everybody = turns(alike[0])
    assert [rival.kind for rival in everybody] == [REPLICAS, *[STATIC, ELASTIC] * 2]
    assert len(everybody[0].engines) == 2


def test_a_plan_asks_in_a_closed_loop_or_at_the_times_of_a_trace() -> None:
    closed, at_a_rate = small_plan(), small_plan(rate_per_s=2.0)
    trace = at_a_rate.trace("mixed")
    assert len(closed.schedule(trace).take(1e9)) == 3
    assert len(at_a_rate.schedule(trace).take(1e9)) == 10
    seconds = (trace.rows[-1].timestamp_ms - trace.rows[0].timestamp_ms) / 1e3
    assert 2.5 < seconds <= 5  # 10 requests at 2 a second


@pytest.mark.parametrize("traces", [("short",), ("mixed",), ("short", "mixed"), ()])
def test_a_rank_holds_the_longest_request_with_its_answer_whatever_is_replayed(
    traces: tuple[str, ...],
) -> None:
    plan = small_plan(cache_tokens=None, traces=traces, scale=64, output_scale=1)
    requests = [r.input_length + r.output_length for n in ("short", "mixed") for r in plan.trace(n).rows]
    assert max(requests) <= plan.rank_tokens(16) < max(requests) + 16
    assert plan.rank_tokens(16) % 16 == 0
    assert replace(plan, cache_tokens=395).rank_tokens(16) == 400


def test_a_rank_holds_a_request_of_any_trace_that_is_replayed() -> None:
    plan = small_plan(cache_tokens=None, traces=("agentic",))
    assert plan.rank_tokens(8) >= max(
        r.input_length + r.output_length for r in plan.trace("agentic").rows
    )


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--duration", "nan"], "--duration nan must be more than 0"),
        (["--ttft", "soon"], "--ttft soon is not a time over 0"),
        (["--request-rate", "0"], "--request-rate 0 must be more than 0"),
        (["--trace", "long"], "--trace long is not one of"),
        (["--context", "x"], "--context x"),
        (["--rounds", "0"], "--rounds 0 is too small"),
        (["--layout", "-tp 1"], "--decode-context-parallel-size 1"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    flags: list[str], says: str, model: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["bench", "elastic", model, "--json", str(tmp_path / "x.json"), *flags]) == 2
    assert says in capsys.readouterr().err
