"""Sizes as people write them, and back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvspan.config.sizes import enough_bytes, fitting_bytes, format_bytes, parse_bytes, parse_count


@pytest.mark.parametrize(
    ("text", "count"),
    [("4096", 4096), ("32k", 32000), ("32K", 32768), ("1.5K", 1536), ("25.6k", 25600), ("1M", 1 << 20)],
)
def test_counts(text: str, count: int) -> None:
    assert parse_count(text) == count


@pytest.mark.parametrize("text", ["", "k", "32q", "0.3K", "-1", "1e3", "32 k k", "٣", "1kb", "9" * 19])
def test_what_is_no_count(text: str) -> None:
    with pytest.raises(ValueError):
        parse_count(text)


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("512MiB", 512 << 20),
        ("512 mib", 512 << 20),
        ("4GB", 4 * 10**9),
        ("4gb", 4 * 10**9),
        ("4G", 4 << 30),
        ("4g", 4 * 10**9),
        ("1.5GiB", 3 << 29),
        ("100", 100),
        ("100B", 100),
        ("2TiB", 2 << 40),
    ],
)
def test_bytes(text: str, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["", "MiB", "4XB", "-4GB", "4GiBB", "nan", "1_000"])
def test_what_is_no_amount(text: str) -> None:
    with pytest.raises(ValueError):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (1024, "1 KiB"),
        (3 << 19, "1.5 MiB"),
        (512 << 20, "512 MiB"),
        (23 << 30, "23 GiB"),
        (5000 << 40, "5000 TiB"),
    ],
)
def test_shown_bytes(num_bytes: int, text: str) -> None:
    assert format_bytes(num_bytes) == text


@given(st.integers(0, 1 << 50))
def test_suggested_amounts_are_on_the_right_side_and_near(num_bytes: int) -> None:
    assert parse_bytes(fitting_bytes(num_bytes)) <= num_bytes <= parse_bytes(enough_bytes(num_bytes))
    step = 1024 if num_bytes < 9 << 20 else 1 << 20
    assert parse_bytes(enough_bytes(num_bytes)) - parse_bytes(fitting_bytes(num_bytes)) <= step
