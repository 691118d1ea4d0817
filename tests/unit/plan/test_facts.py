"""Facts: rows of data, users' rows, collectives between measured points; bad rows named."""

import math
from pathlib import Path

import pytest

from kvspan.cost.facts import OPS, Device, find_device, load_devices
from kvspan.errors import ConfigError

ROW = """
[accelerators.Mine]
memory_gib = 24
hbm = 1000
bf16 = 100
link = 32
"""


@pytest.fixture
def b200() -> Device:
    return find_device("b200-sxm", load_devices())


@pytest.mark.parametrize(("num_bytes", "us"), [(1024, 16.9), (524288, 19.4), (2097152, 22.5), (1, 16.9)])
def test_measured_points_are_met(b200: Device, num_bytes: int, us: float) -> None:
    assert b200.collective_s("ag", num_bytes, num_ranks=8) == pytest.approx(us * 1e-6)


def test_between_points_time_and_bytes_are_interpolated_as_logarithms(b200: Device) -> None:
    middle = math.sqrt(524288 * 2097152)
    expected_us = math.sqrt(14.0 * 22.8)
    assert b200.collective_s("a2a", middle, num_ranks=8) == pytest.approx(expected_us * 1e-6)


@pytest.mark.parametrize("op", OPS)
def test_beyond_the_last_point_the_bus_bounds(b200: Device, op: str) -> None:
    far, farther = (b200.collective_s(op, size, num_ranks=8) for size in (1 << 30, 2 << 30))
    sent = (2 if op == "ar" else 1) * 7 / 8 * (1 << 30)
    assert (farther - far) == pytest.approx(sent / (b200.collectives[0].bus_gbs[op] * 1e9))


def test_a_group_of_one_and_no_bytes_take_no_time(b200: Device) -> None:
    assert b200.collective_s("ag", 1 << 20, num_ranks=1) == 0
    assert b200.collective_s("ag", 0, num_ranks=8) == 0


def test_ranks_of_two_domains_meet_over_the_network(b200: Device) -> None:
    size = 1 << 30
    assert b200.collective_s("ag", size, num_ranks=16) >= size * 15 / 16 / 100e9
    assert b200.collective_s("ag", size, num_ranks=8) < size / 100e9


def test_rows_can_be_added_in_toml(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(ROW)
    mine = find_device("mine", load_devices([file]))
    assert mine.memory_bytes == 24 << 30
    assert mine.rates_of(4).kv_gbs == pytest.approx(900)


@pytest.mark.parametrize(
    ("was", "is_", "said"),
    [
        ("hbm = 1000", "", '"hbm" is missing'),
        ("bf16 = 100", "", '"bf16" is missing'),
        ("link = 32", "link = -1", '"link" is -1'),
        ("memory_gib = 24", "memory_gib = 0", '"memory_gib" is 0'),
        ("memory_gib = 24", "memory_gib = inf", '"memory_gib" is inf'),
        ("memory_gib = 24", 'memory_gib = "much"', "'much'"),
        ("link = 32", 'link = 32\ncollectives = "X100x8"', "X100x8"),
        ("link = 32", "link = 32\nrates = [{ num_ranks = 1 }]", "weights_gbs"),
        ("[accelerators.Mine]", "[machines.Mine]", "no table"),
        ("hbm = 1000", "hbm = = 1000", "cannot be read"),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, was: str, is_: str, said: str) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(ROW.replace(was, is_))
    with pytest.raises(ConfigError, match=r"mine\.toml") as refused:
        load_devices([file])
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("name", "near"), [("B100", "GB200"), ("h200", "H200-SXM"), ("zzz", "A100-SXM")]
)
def test_an_unknown_accelerator_lists_near_ones(name: str, near: str) -> None:
    with pytest.raises(ConfigError, match=near):
        find_device(name, load_devices())
