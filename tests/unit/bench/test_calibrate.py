"""A row that is written is the row that is read; this host's own figures are figures."""

from pathlib import Path

import msgspec
import pytest

from kvspan.bench.calibrate import as_toml, at_the_moment, calibrate, typical
from kvspan.bench.probe import Probe
from kvspan.bench.tiny import _config
from kvspan.cli.main import main
from kvspan.comm.shm import refusal
from kvspan.cost.facts import Collectives, Device, Rates, find_device, load_devices
from kvspan.layers.matmul import packing_isa

ROW = Device(
    name="my.host-2",
    memory_bytes=12 << 30,
    link_gbs=9.5,
    inter_node_gbs=9.5,
    link_domain=2,
    rates=(
        Rates(
            num_ranks=2,
            weights_gbs=16.25,
            kv_gbs=15.5,
            gemm_tflops={"bf16": 0.25},
            attention_tflops=0.125,
            kernel_us=40.5,
            step_us=700.0,
            row_us=46.0,
            layer_row_us=1e-05,
            more_rows_gbs=((4.0, 15.5), (8.0, 10.25)),
            fewer_ranks_gbs=((1, 30.5),),
            meeting_us={"gather": 30.5, "a2a": 5.5, "ag_rs": 80.5},
            played=False,
        ),
    ),
    collectives=(
        Collectives(
            num_ranks=2,
            points_us=dict.fromkeys(("ag", "rs", "a2a", "ar"), ((1024, 6.5), (65536, 30.25))),
            bus_gbs=dict.fromkeys(("ag", "rs", "a2a", "ar"), 5.5),
        ),
    ),
    source="kvspan plan calibrate, 2 cores",
)


def test_a_written_row_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "host.toml"
    file.write_text(as_toml(ROW))
    assert find_device("my.host-2", load_devices([file])) == ROW


def reached(gbs: float) -> Probe:
    return Probe(
        weights_gbs=gbs,
        more_rows_gbs=((4.0, gbs / 2),),
        fewer_ranks_gbs=((1, 2 * gbs),),
        gemm_tflops=0.5,
        kv_gbs=gbs + 1,
        attention_tflops=0.25,
    )


def test_of_several_rounds_each_figure_is_the_median() -> None:
    slow = msgspec.structs.replace(
        ROW.rates[0], weights_gbs=1.0, meeting_us={"gather": 1e3, "a2a": 1.0, "ag_rs": 2.0}
    )
    fast = msgspec.structs.replace(
        ROW.rates[0], weights_gbs=99.0, step_us=1.0, more_rows_gbs=((4.0, 1.0), (8.0, 99.0))
    )
    found = typical([ROW.rates[0], slow, fast])
    assert (found.weights_gbs, found.step_us) == (16.25, 700.0)
    assert found.meeting_us == ROW.rates[0].meeting_us
    assert found.more_rows_gbs == ROW.rates[0].more_rows_gbs
    assert typical([ROW, ROW]) == ROW


def test_kernels_of_the_moment_leave_all_else_as_it_was() -> None:
    device = msgspec.structs.replace(
        ROW, rates=(*ROW.rates, msgspec.structs.replace(ROW.rates[0], num_ranks=1))
    )
    now = at_the_moment(device, num_ranks=2, reached=[reached(20.0), reached(10.0)])
    assert now.rates[1] == device.rates[1]
    assert now.rates[0] == msgspec.structs.replace(
        ROW.rates[0],
        weights_gbs=15.0,
        more_rows_gbs=((4.0, 7.5),),
        fewer_ranks_gbs=((1, 30.0),),
        gemm_tflops={"bf16": 0.5},
        kv_gbs=16.0,
        attention_tflops=0.25,
    )


def test_made_up_models_have_equal_bytes_whatever_their_layers() -> None:
    def layer_bytes(num_layers: int, weight_bytes: int) -> int:
        config = _config(num_layers, weight_bytes)
        hidden, size = config["hidden_size"], config["intermediate_size"]
        assert isinstance(hidden, int)
        assert isinstance(size, int)
        attention = 2 * (4 + 2) * 64 * hidden  # queries, outputs; keys, values
        return 2 * num_layers * (attention + 3 * hidden * size)

    asked = 64 << 20
    few, many, twice = layer_bytes(8, asked), layer_bytes(40, asked), layer_bytes(8, 2 * asked)
    assert few == pytest.approx(asked, rel=1e-3)
    assert many == pytest.approx(few, rel=1e-3)
    assert twice == pytest.approx(2 * few, rel=1e-3)
    assert layer_bytes(8, 0) < asked / 20


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(refusal() is not None, reason="ranks of this host cannot meet in shared memory")
def test_this_host_is_measured(tmp_path: Path) -> None:
    found = calibrate("here", 2, num_rounds=1)
    ways = (False, True) if packing_isa() else (False,)
    assert [(r.num_ranks, r.played) for r in found.rates] == [(n, way) for n in (1, 2) for way in ways]
    for rates in found.rates:
        assert rates.weights_gbs > 0.1
        assert rates.kv_gbs > 0.1
        assert [rows for rows, _ in rates.more_rows_gbs] == [4, 8, 16, 32]
        assert [n for n, _ in rates.fewer_ranks_gbs] == ([1] if rates.num_ranks == 2 else [])
        assert 0 <= rates.kernel_us < 10_000  # a difference, which vanishes beside other programs
    file = tmp_path / "here.toml"
    file.write_text(as_toml(found))
    load = ["--input", "4096", "--output", "128"]  # SmolLM2 has room for 8,192 tokens
    hardware = ["--facts", str(file), "--hardware", "here", "--gpus", "2"]
    assert main(["plan", "smollm2-135m", *hardware, *load]) == 0
    assert msgspec.json.encode(found)


@pytest.mark.parametrize("flags", [["--ranks", "0"], ["--ranks", "1000"], ["--name", "a b"]])
def test_nonsense_is_refused(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "calibrate", *flags]) == 2
    assert flags[0] in capsys.readouterr().err
