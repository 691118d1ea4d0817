"""Step times: what PCP shares out, what it hands round, and what stays as it was."""

from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvspan.cost.deployment import KVSPAN, Deployment
from kvspan.cost.facts import Device, Rates, find_device, load_devices
from kvspan.cost.memory import kv_bytes_per_global_token
from kvspan.cost.steptime import StepCost
from kvspan.cost.weights import WeightDtypes, rank_weights
from kvspan.cost.work import StepWork, decode_work
from kvspan.layout import CacheLayout
from kvspan.plan.capacity import capacity_of
from kvspan.plan.models import find_model
from kvspan.topology import Topology

MODELS = ("DeepSeek-R1", "Llama-3.1-70B", "Qwen3-235B-A22B")


def cost_of(name: str, *, tp: int, dcp: int = 1, pcp: int = 1, replicate_q: bool = False) -> StepCost:
    return StepCost(
        Deployment(
            model=find_model(name).config,
            device=find_device("GB300", load_devices()),
            topology=Topology(tp_size=tp, dcp_size=dcp, pcp_size=pcp),
            dtypes=WeightDtypes(),
            kv_dtype_bytes=2,
            replicate_q=replicate_q,
        )
    )


def prompt(cost: StepCost, tokens: int, *, cached: int = 0) -> dict[str, float]:
    return cost.parts_s(StepWork.of([(cached, tokens)], num_sampled=1, ways=cost.ways))


@pytest.mark.parametrize("replicate_q", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_a_coordinate_keeps_the_weights_of_the_layout_without_others(
    name: str, replicate_q: bool
) -> None:
    """Columns are cut over the W / P ranks of a coordinate, whatever the others do."""
    model = find_model(name).config

    def kept(topology: Topology) -> int:
        weights = rank_weights(model, topology, replicate_q=replicate_q, dtypes=WeightDtypes())
        return weights.num_bytes

    for dcp_size in (1, 2, 4):
        alone = Topology(tp_size=4, dcp_size=dcp_size)
        assert kept(replace(alone, pcp_size=2, dcp_size=2 * dcp_size)) == kept(alone)
    assert kept(Topology(tp_size=4, pcp_size=2)) == kept(Topology(tp_size=4))


@pytest.mark.parametrize("name", MODELS)
def test_dcp_that_spans_pcp_keeps_a_share_and_pcp_alone_a_copy(name: str) -> None:
    model = find_model(name).config
    alone, copies = Topology(tp_size=4), Topology(tp_size=4, pcp_size=2)
    spread = Topology(tp_size=4, pcp_size=2, dcp_size=2)
    each = [kv_bytes_per_global_token(model, t, kv_dtype_bytes=2) for t in (alone, copies, spread)]
    assert each[0] == each[1] == 2 * each[2]
    held = [
        capacity_of(
            cost_of(name, tp=4, pcp=pcp, dcp=dcp),
            CacheLayout(block_size=64, dcp_size=dcp, interleave=64),
            fraction=0.9,
        ).tokens
        for pcp, dcp in ((1, 1), (2, 1), (2, 2))
    ]
    assert held[0] == held[1]
    assert held[2] == 2 * held[0]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dcp", [1, 2])
def test_two_coordinates_halve_what_a_long_prompt_computes(name: str, dcp: int) -> None:
    one, two = cost_of(name, tp=4), cost_of(name, tp=4, pcp=2, dcp=dcp)
    before, after = prompt(one, 8192), prompt(two, 8192)
    assert after["attention"] == pytest.approx(before["attention"] / 2, rel=0.1)
    assert after["projections"] < 0.75 * before["projections"]  # latents are expanded by both
    assert after["gather keys"] > before["gather keys"] == 0
    assert sum(after.values()) < sum(before.values())


def test_short_prompts_and_single_rows_gain_nothing() -> None:
    one, two = (cost_of("Llama-3.1-70B", tp=4, pcp=pcp) for pcp in (1, 2))
    assert prompt(two, 20)["mlp"] == prompt(one, 20)["mlp"]
    one_row, two_rows, three = (decode_work(1000, batch=n) for n in (1, 2, 3))
    for part in ("attention", "mlp", "all-reduce"):
        assert two.parts_s(two_rows)[part] == one.parts_s(one_row)[part]
        assert two.parts_s(three)[part] == pytest.approx(one.parts_s(two_rows)[part])


def test_queries_travel_between_coordinates_even_if_each_rank_makes_them_whole() -> None:
    work = decode_work(32768, batch=8)
    within, across = (
        cost_of("DeepSeek-R1", tp=4, dcp=4, pcp=pcp, replicate_q=True).parts_s(work)["gather queries"]
        for pcp in (1, 2)
    )
    assert within == 0 < across


@given(st.integers(0, 1000), st.integers(0, 1000), st.integers(1, 8))
def test_the_busiest_coordinate(whole: int, cut: int, pcp_size: int) -> None:
    work = StepWork(num_tokens=whole + cut, num_sampled=0, keys=0, pairs=0, whole_tokens=whole)
    assert work.busiest_rows(pcp_size) == pytest.approx(-(-whole // pcp_size) + cut / pcp_size)
    mean = replace(work, num_tokens=work.num_tokens + 0.5, whole_tokens=whole + 0.5)
    assert work.busiest_rows(pcp_size) <= mean.busiest_rows(pcp_size)
    assert mean.busiest_rows(1) == pytest.approx(mean.num_tokens)


@given(
    st.sampled_from(MODELS),
    st.sampled_from([(8, 1, 1), (8, 8, 1), (4, 8, 2), (4, 1, 2), (2, 4, 4)]),
    st.integers(1, 200_000),
    st.integers(1, 2000),
)
def test_more_context_and_more_rows_never_take_less(
    name: str, layout: tuple[int, int, int], context: int, batch: int
) -> None:
    tp, dcp, pcp = layout
    if name == "Llama-3.1-70B" and dcp // pcp > 1 and tp // (dcp // pcp) not in (1, 2, 4, 8):
        return
    cost = cost_of(name, tp=tp, dcp=dcp, pcp=pcp)
    now = cost.step_s(decode_work(context, batch=batch))
    assert 0 < now <= cost.step_s(decode_work(context + 1000, batch=batch))
    assert now <= cost.step_s(decode_work(context, batch=batch + 1))


def test_what_ranks_do_beside_collectives_counts_once_a_layer_where_they_meet() -> None:
    plain, work = cost_of("Llama-3.1-70B", tp=8, dcp=1), decode_work(4096, batch=4)
    device = plain.on.device
    beside = {"gather": 100.0, "a2a": 10.0, "ag_rs": 50.0}
    slow = msgspec.structs.replace(
        device, rates=tuple(msgspec.structs.replace(r, meeting_us=beside) for r in device.rates)
    )
    for on, us in (
        (plain.on, 0),
        (replace(plain.on, topology=Topology(tp_size=8, dcp_size=2)), 110),
        (replace(plain.on, topology=Topology(tp_size=8, dcp_size=2), replicate_q=True), 10),
        (replace(plain.on, topology=Topology(tp_size=8, dcp_size=2), exchange="ag_rs"), 150),
    ):
        before, after = (StepCost(replace(on, device=each)).step_s(work) for each in (device, slow))
        assert after - before == pytest.approx(80 * us * 1e-6, abs=1e-9)


def test_rows_count_between_reading_and_multiplying() -> None:
    (rates,) = find_device("GB300", load_devices()).rates
    assert rates.read_gbs(1) == rates.read_gbs(64) == rates.weights_gbs
    measured = msgspec.structs.replace(rates, weights_gbs=32.0, more_rows_gbs=((4.0, 16.0), (16.0, 4.0)))
    assert [measured.read_gbs(rows) for rows in (0.5, 1, 4, 16, 64)] == [32, 32, 16, 4, 4]
    assert measured.read_gbs(2) == pytest.approx(32 / 2**0.5)
    assert measured.read_gbs(8) == pytest.approx(8)


def test_ranks_that_wait_leave_the_memory_to_those_that_read() -> None:
    """A step of one row reads the weights of one coordinate; with a row each, all coordinates read.

    In a team all of them read whoever has the row.
    """
    layout = cost_of("Llama-3.1-70B", tp=2, dcp=4, pcp=4).on
    rates = msgspec.structs.replace(layout.device.rates[0], num_ranks=8)
    alone = msgspec.structs.replace(
        rates, fewer_ranks_gbs=((2, 4 * rates.weights_gbs), (4, 2 * rates.weights_gbs))
    )

    def reading_s(kernels: Rates, batch: int, *, teams: bool) -> float:
        device = msgspec.structs.replace(layout.device, rates=(kernels,))
        cost = StepCost(replace(layout, device=device, habits=replace(KVSPAN, teams=teams)))
        parts = cost.parts_s(decode_work(64, batch=batch))
        return parts["mlp"] - 2 * 80 * rates.kernel_us * 1e-6

    for batch, times in ((1, 4), (2, 2), (3, 2), (4, 1), (5, 1)):
        before, after = (reading_s(each, batch, teams=False) for each in (rates, alone))
        assert before == pytest.approx(times * after)
        assert reading_s(rates, batch, teams=True) == reading_s(alone, batch, teams=True)


def host(*, in_python: bool) -> Device:
    """A device with figures of both ways, of which Python's are ten times those of the other."""
    device = find_device("GB300", load_devices())
    slow_points = {
        op: tuple((size, 10 * us) for size, us in points)
        for op, points in device.collectives[0].points_us.items()
    }
    rates, collectives = device.rates[0], device.collectives[0]
    slow_rates = msgspec.structs.replace(rates, kernel_us=10 * rates.kernel_us, played=False)
    slow = msgspec.structs.replace(collectives, points_us=slow_points, played=False)
    return msgspec.structs.replace(
        device,
        rates=(slow_rates,) if in_python else (rates, slow_rates),
        collectives=(slow,) if in_python else (collectives, slow),
    )


@pytest.mark.parametrize(
    ("name", "exchange", "dtype", "work", "played"),
    [
        ("Llama-3.1-70B", "a2a", "bf16", decode_work(4096, batch=128), True),
        ("Llama-3.1-70B", "a2a", "bf16", decode_work(4096, batch=129), False),
        ("Llama-3.1-70B", "a2a", "bf16", StepWork.of([(4096, 1), (0, 2)], num_sampled=2), False),
        ("Llama-3.1-70B", "a2a", "bf16", StepWork.of([(4096, 1), (63, 1)], num_sampled=1), True),
        ("Llama-3.1-70B", "ag_rs", "bf16", decode_work(4096, batch=4), True),
        ("Llama-3.1-70B", "a2a", "fp32", decode_work(4096, batch=4), False),
        ("Qwen3-235B-A22B", "a2a", "bf16", decode_work(4096, batch=4), True),
    ],
)
def test_facts_of_the_way_in_which_a_step_runs_are_asked_for(
    name: str, exchange: str, dtype: str, work: StepWork, played: bool
) -> None:
    def step_s(device: Device) -> float:
        on = replace(
            cost_of(name, tp=8, dcp=2).on,
            device=device,
            exchange=exchange,
            dtypes=WeightDtypes(linear=dtype, experts=dtype, ends=dtype),
        )
        return StepCost(on).step_s(work)

    fast, slow = step_s(find_device("GB300", load_devices())), step_s(host(in_python=True))
    assert fast < slow
    assert step_s(host(in_python=False)) == (fast if played else slow)


def test_an_exchange_that_is_gathered_and_scattered_is_played_where_there_is_none() -> None:
    on = replace(cost_of("Llama-3.1-70B", tp=8).on, exchange="ag_rs", device=host(in_python=False))
    work = decode_work(4096, batch=4)
    assert StepCost(on).step_s(work) < StepCost(on, in_python=True).step_s(work)


@pytest.mark.parametrize("name", MODELS)
def test_a_team_reads_a_part_where_rows_are_few_and_nothing_changes_where_they_are_many(
    name: str,
) -> None:
    team = cost_of(name, tp=1, dcp=4, pcp=4)
    alone = StepCost(replace(team.on, habits=replace(KVSPAN, teams=False)))
    few, many = (decode_work(8192, batch=n) for n in (64, 4 * 300))
    assert team.step_s(few) < 0.8 * alone.step_s(few)
    assert team.parts_s(many) == alone.parts_s(many)
    chunk = StepWork.of([(8192, 1)] * 16 + [(0, 64)], num_sampled=17, ways=team.ways)
    assert team.parts_s(chunk) == alone.parts_s(chunk)  # counted for steps that only decode
