"""How sizes are written: `32k` tokens, `512MiB` of memory, bytes of a dtype. Knows no flags."""

import re
from collections.abc import Mapping
from fractions import Fraction

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
"""Bytes of one element of each dtype that kvspan computes in."""
KV_DTYPE_BYTES = {**DTYPE_BYTES, "fp8_e4m3": 1, "int8": 1}
"""Bytes of one cached element, without the scales that 8 bits come with."""

_COUNTS = {
    "": 1,
    **{letter: 1000**power for power, letter in enumerate("kmgt", start=1)},
    **{letter: 1024**power for power, letter in enumerate("KMGT", start=1)},
}
_BYTES = {
    "b": 1,
    **{f"{letter}b": 1000**power for power, letter in enumerate("kmgt", start=1)},
    **{f"{letter}ib": 1024**power for power, letter in enumerate("kmgt", start=1)},
}


def parse_count(text: str) -> int:
    """A number of things: `4096`, `32k` = 32000, `32K` = 32768, `1.5K` = 1536; m M g G t T likewise.

    Raises:
        ValueError: it is not written so, or is not a whole number.
    """
    count = _parse(text, _COUNTS)
    if count.denominator != 1:
        raise ValueError(f"{text} is not a whole number")
    return int(count)


def parse_bytes(text: str) -> int:
    """Bytes: `512MiB`, `4GB` = 4 * 1000^3 in any case, or as `parse_count` has it; rounded down.

    Raises:
        ValueError: it is not written so.
    """
    return int(_parse(text, _COUNTS | _BYTES))


def format_bytes(num_bytes: int) -> str:
    """For readers: `512 bytes`, `1.5 MiB`, `22.1 GiB`."""
    power = min(max(num_bytes.bit_length() - 1, 0) // 10, 4)
    unit = ("bytes", "KiB", "MiB", "GiB", "TiB")[power]
    return f"{num_bytes / 1024**power:.1f}".removesuffix(".0") + f" {unit}"


def enough_bytes(num_bytes: int) -> str:
    """For flags: an amount like `24MiB` or `3KiB`, rounded up to be no less than `num_bytes`."""
    kib = -(-num_bytes // 1024)
    return f"{kib}KiB" if kib < 10240 else f"{-(-kib // 1024)}MiB"


def fitting_bytes(num_bytes: int) -> str:
    """For flags: an amount like `24MiB` or `3KiB`, rounded down to be no more than `num_bytes`."""
    kib = num_bytes // 1024
    return f"{kib}KiB" if kib < 10240 else f"{kib // 1024}MiB"


def _parse(text: str, scales: Mapping[str, int]) -> Fraction:
    """A decimal number with one of the suffixes of `scales`, which may be in lower case there."""
    found = re.fullmatch(r"([0-9]{1,18}(?:\.[0-9]{1,18})?) ?([A-Za-z]*)", text.strip())
    if found is None:
        raise ValueError(f"{text} is not a number such as 4096, or one with a unit such as 4k or 4K")
    number, suffix = found.groups()
    scale = scales.get(suffix, scales.get(suffix.lower()))
    if scale is None:
        raise ValueError(f"{text} has an unknown unit")
    return Fraction(number) * scale
