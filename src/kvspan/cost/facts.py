"""What machines can do, as data: peaks of accelerators, what kernels reach of them, collectives.

Rows come from `data/hardware.json`, and from TOML files that the user names (`kvspan plan calibrate`
one). A row of peaks is made into rates by the fractions below; a calibrated row has its own rates.
Knows no models and no layouts.
"""

import json
import math
import re
import tomllib
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import msgspec

from kvspan.errors import ConfigError, reason_of

DATA = Path(__file__).parents[1] / "data"
"""Facts that come with kvspan."""

BANDWIDTH_FRACTION = 0.9
"""Of a memory's peak, for kernels that stream it: FlashMLA's README has 3,000 of H800's 3,350 GB/s."""
GEMM_FRACTION = 0.7
"""Of a peak, for matrix products: DeepGEMM's README has 1,358 to 1,550 of H800's 1,979 fp8 TFLOP/s."""
ATTENTION_FRACTION = 0.67
"""Of the bf16 peak: FlashMLA's README has 660 of 989 TFLOP/s on H800."""
KERNEL_US = 3.4
"""A short kernel inside a CUDA graph, launch included (NVIDIA, Getting Started with CUDA Graphs)."""
STEP_US = 1000.0
"""Of a step on the host that no kernel hides. Assumed: steps are rarely nearer to their kernels."""

OPS = ("ag", "rs", "a2a", "ar")
"""all-gather, reduce-scatter, all-to-all, all-reduce."""


class Collectives(msgspec.Struct, frozen=True, kw_only=True):
    """How long collectives take among the ranks of one host.

    Args:
        num_ranks: of the group that was measured.
        points_us: for each of `OPS`, (bytes of the whole buffer, microseconds), ascending.
        bus_gbs: for each of `OPS`, GB/s beyond the last point, as a rank's link carries them.
        played: whether they followed one another as calls of a played step do (`cost.played`).
    """

    num_ranks: int
    points_us: dict[str, tuple[tuple[int, float], ...]]
    bus_gbs: dict[str, float]
    played: bool = True

    def time_us(self, op: str, whole_bytes: float) -> float:
        """Microseconds of one collective: straight lines between points, bytes and time both as logs.

        Args:
            op: one of `OPS`.
            whole_bytes: of the whole buffer: gathered, to be reduced, or of all pieces that a rank has.
        """
        points = self.points_us[op]
        sizes = [size for size, _ in points]
        if whole_bytes <= sizes[0]:
            return points[0][1]
        if whole_bytes >= sizes[-1]:
            sent = (whole_bytes - sizes[-1]) * sent_share(op, self.num_ranks)
            return points[-1][1] + sent / (self.bus_gbs[op] * 1e3)
        right = bisect_right(sizes, whole_bytes)
        (size0, us0), (size1, us1) = points[right - 1], points[right]
        place = math.log(whole_bytes / size0) / math.log(size1 / size0)
        return float(us0 * (us1 / us0) ** place)


def sent_share(op: str, num_ranks: int) -> float:
    """Of the whole buffer, what a rank's link carries: an all-reduce is a scatter and a gather."""
    return (2 if op == "ar" else 1) * (num_ranks - 1) / num_ranks


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """What kernels of one rank reach while `num_ranks` ranks work.

    Args:
        num_ranks: ranks that worked side by side when it was measured; they may share a memory.
        weights_gbs: GB/s of weights read by matrix products of one row, on all ranks at once.
        more_rows_gbs: the same of products of more rows, as (rows, GB/s), ascending: between few rows
            and many, reading and multiplying overlap in part. Empty = they overlap wholly.
        fewer_ranks_gbs: of products of one row while so many ranks read and the others wait, as
            (ranks, GB/s), ascending; they share a memory. Empty = the others make no difference.
        kv_gbs: GB/s of cached keys and values read by attention.
        gemm_tflops: TFLOP/s of matrix products, by what multiplies: `bf16`, `fp8`, `fp4`.
        attention_tflops: TFLOP/s of attention.
        kernel_us: microseconds of an operator that has nearly nothing to do.
        step_us: microseconds of a step beside its operators.
        row_us: microseconds more for each row of a step.
        layer_row_us: microseconds more of a layer for each row after the first, beside operators.
        meeting_us: microseconds of a layer beside the collectives of `gather` (of queries), `a2a` and
            `ag_rs`; what is not there takes none.
        played: whether steps were played (`cost.played`); False = Python ran them.
    """

    num_ranks: int
    weights_gbs: float
    kv_gbs: float
    gemm_tflops: dict[str, float]
    attention_tflops: float
    kernel_us: float
    step_us: float
    row_us: float = 0.0
    layer_row_us: float = 0.0
    meeting_us: dict[str, float] = {}
    more_rows_gbs: tuple[tuple[float, float], ...] = ()
    fewer_ranks_gbs: tuple[tuple[int, float], ...] = ()
    played: bool = True

    def read_gbs(self, flops_per_byte: float) -> float:
        """GB/s of weights by products: straight lines between points, rows and rate both as logs.

        Args:
            flops_per_byte: of weights; of bf16 that is the rows.
        """
        points = ((1.0, self.weights_gbs), *self.more_rows_gbs)
        right = bisect_right([rows for rows, _ in points], flops_per_byte)
        if right in (0, len(points)):
            return points[max(right - 1, 0)][1]
        (rows0, gbs0), (rows1, gbs1) = points[right - 1], points[right]
        place = math.log(flops_per_byte / rows0) / math.log(rows1 / rows0)
        return float(gbs0 * (gbs1 / gbs0) ** place)

    def while_reading(self, num_ranks: int) -> "Rates":
        """Rates of the ranks that have rows, when no more than so many have one, and each has one."""
        fewer = dict(self.fewer_ranks_gbs)
        if num_ranks >= self.num_ranks or not fewer:
            return self
        nearest = min(fewer, key=lambda n: abs(math.log(n / num_ranks)))
        return msgspec.structs.replace(self, weights_gbs=fewer[nearest], more_rows_gbs=())


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of accelerator, or a host whose ranks are processes.

    Args:
        name: as `--hardware` names it.
        memory_bytes: of one rank.
        link_gbs: GB/s one way to the neighbours of its domain.
        inter_node_gbs: GB/s one way to ranks of other domains.
        link_domain: ranks that its links join.
        rates: by number of ranks and by how steps run; at least one.
        collectives: likewise.
        source: where the figures are from.
        verified: whether they were looked up; False = they are from memory.
    """

    name: str
    memory_bytes: int
    link_gbs: float
    inter_node_gbs: float
    link_domain: int
    rates: tuple[Rates, ...]
    collectives: tuple[Collectives, ...]
    source: str
    verified: bool = True

    def rates_of(self, num_ranks: int, *, played: bool = True) -> Rates:
        """Rates measured with the number of ranks nearest to `num_ranks`.

        Args:
            num_ranks: of a replica.
            played: how steps run; where that was not measured, they take as long as the others.
        """
        return min(self.rates, key=lambda r: _unlike(r, num_ranks, played=played))

    def collective_s(self, op: str, whole_bytes: float, *, num_ranks: int, played: bool = True) -> float:
        """Seconds of one collective.

        A group that was not measured is looked up in the nearest one that was, by what a rank sends.
        That keeps the latter's latency, which for smaller groups is a bound from above.

        Args:
            op: one of `OPS`.
            whole_bytes: see `Collectives.time_us`.
            num_ranks: of the group; a group of one has nothing to say.
            played: see `rates_of`.
        """
        if num_ranks == 1 or not whole_bytes:
            return 0.0
        measured = min(self.collectives, key=lambda c: _unlike(c, num_ranks, played=played))
        alike = whole_bytes * sent_share(op, num_ranks) / sent_share(op, measured.num_ranks)
        within = measured.time_us(op, alike) * 1e-6
        if num_ranks <= self.link_domain:
            return within
        sent = whole_bytes * sent_share(op, num_ranks)
        return max(within, sent / (self.inter_node_gbs * 1e9))


def _unlike(measured: Rates | Collectives, num_ranks: int, *, played: bool) -> tuple[bool, float]:
    """How far a measurement is from what is asked for: the way in which steps run counts first."""
    return measured.played != played, abs(math.log(measured.num_ranks / num_ranks))


def load_devices(files: Iterable[Path] = ()) -> dict[str, Device]:
    """All rows by name: those that come with kvspan, then those of the user's files, which win.

    Args:
        files: TOML, with a table `[accelerators.NAME]` for each row.

    Raises:
        ConfigError: a file cannot be read, or a row lacks a figure or has one that cannot be.
    """
    packaged = json.loads((DATA / "hardware.json").read_text())
    measured = _packaged_collectives(packaged["collectives_us"])
    devices = {
        name: _device(name, row, measured, where="hardware.json")
        for name, row in packaged["accelerators"].items()
    }
    for file in files:
        rows = _read_toml(file).get("accelerators", {})
        if not isinstance(rows, dict) or not rows:
            raise ConfigError(f"--facts {file} has no table [accelerators.NAME].")
        devices |= {name: _device(name, row, measured, where=str(file)) for name, row in rows.items()}
    return devices


def find_device(name: str, devices: Mapping[str, Device]) -> Device:
    """The row of a name, in any case.

    Raises:
        ConfigError: there is none; the sentence lists near names.
    """
    by_lower = {known.lower(): device for known, device in devices.items()}
    if (device := by_lower.get(name.lower())) is not None:
        return device
    near = get_close_matches(name.lower(), by_lower, n=3, cutoff=0.5)
    near += [known for known in by_lower if name and name.lower() in known and known not in near]
    listed = ", ".join(by_lower[n].name for n in near) or ", ".join(devices)
    hint = "the nearest are" if near else "there are"
    raise ConfigError(f"--hardware {name} is not known: {hint} {listed}; --facts FILE.toml adds rows.")


def device_of_model(model: str, devices: Mapping[str, Device]) -> Device | None:
    """The row of a GPU as its driver calls it, or None: `NVIDIA H100 80GB HBM3` -> `H100-SXM`.

    Rows are of boards with links, so one without them (PCIe, NVL) has none.
    """
    if re.search(r"PCIe|NVL", model):
        return None
    words = set(re.split(r"[^A-Za-z0-9]+", model))
    return next((device for name, device in devices.items() if name.split("-")[0] in words), None)


def _read_toml(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"--facts {file} cannot be read: {reason_of(error)}.") from error


def _packaged_collectives(raw: Mapping[str, Any]) -> dict[str, Collectives]:
    """The hosts that were measured."""
    return {
        host: Collectives(
            num_ranks=raw["num_ranks"],
            points_us={op: tuple(zip(raw["bytes"], figures[op], strict=True)) for op in OPS},
            bus_gbs=figures["bus_gbs"],
        )
        for host, figures in raw.items()
        if isinstance(figures, dict)
    }


def _device(name: str, row: object, measured: Mapping[str, Collectives], *, where: str) -> Device:
    """A row as a device."""
    if not isinstance(row, dict):
        raise ConfigError(f"{where}: accelerators.{name} is no table.")
    read = _Row(row, f"{where}: accelerators.{name}")
    link = read.number("link")
    collectives = row.get("collectives", "H200x8")
    if isinstance(collectives, str):
        if collectives not in measured:
            hosts = ", ".join(measured)
            raise ConfigError(f'{read.where}: "collectives" is {collectives!r}, and there are {hosts}.')
        collectives = [measured[collectives]]
    rates = row.get("rates") or [_rates_of_peaks(read)]
    try:
        return Device(
            name=name,
            memory_bytes=int(read.number("memory_gib") * 2**30),
            link_gbs=link,
            inter_node_gbs=read.number("inter_node", default=link),
            link_domain=int(read.number("link_domain", default=8)),
            rates=msgspec.convert(rates, tuple[Rates, ...]),
            collectives=msgspec.convert(collectives, tuple[Collectives, ...], from_attributes=True),
            source=str(row.get("source", where)),
            verified=not row.get("unverified", False),
        )
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: accelerators.{name}: {error}.") from None


def _rates_of_peaks(read: "_Row") -> dict[str, Any]:
    """What kernels are taken to reach of a data sheet's figures."""
    peaks = {
        kind: read.number(kind) for kind in ("bf16", "fp8", "fp4") if read.row.get(kind) is not None
    }
    if "bf16" not in peaks:
        raise ConfigError(f'{read.where}: the key "bf16" is missing (TFLOP/s, dense).')
    gbs = read.number("hbm") * BANDWIDTH_FRACTION
    return {
        "num_ranks": 8,
        "weights_gbs": gbs,
        "kv_gbs": gbs,
        "gemm_tflops": {kind: peak * GEMM_FRACTION for kind, peak in peaks.items()},
        "attention_tflops": peaks["bf16"] * ATTENTION_FRACTION,
        "kernel_us": KERNEL_US,
        "step_us": STEP_US,
    }


class _Row:
    """A row whose numbers are checked as they are read.

    Args:
        row: the table.
        where: file and table, for errors.
    """

    def __init__(self, row: Mapping[str, Any], where: str) -> None:
        self.row = row
        self.where = where

    def number(self, key: str, *, default: float | None = None) -> float:
        """A finite number over 0."""
        value = self.row.get(key, default)
        if value is None:
            raise ConfigError(f'{self.where}: the key "{key}" is missing.')
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
            raise ConfigError(f'{self.where}: "{key}" is {value!r}; it must be a number over 0.')
        return float(value)
