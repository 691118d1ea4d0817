"""A row that is written is the row that is read; this host's own figures are figures."""

from pathlib import Path

import msgspec
import pytest

from kvspan.bench.calibrate import as_toml, calibrate
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


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(refusal() is not None, reason="ranks of this host cannot meet in shared memory")
def test_this_host_is_measured(tmp_path: Path) -> None:
    found = calibrate("here", 2)
    ways = (False, True) if packing_isa() else (False,)
    assert [(r.num_ranks, r.played) for r in found.rates] == [(n, way) for n in (1, 2) for way in ways]
    for rates in found.rates:
        assert rates.weights_gbs > 0.1
        assert rates.kv_gbs > 0.1
        assert 0.05 < rates.kernel_us < 10_000
    for called, played in zip(found.rates[::2], found.rates[1::2], strict=True) if packing_isa() else ():
        assert played.kernel_us < called.kernel_us
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
