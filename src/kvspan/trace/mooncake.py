"""Trace files in the Mooncake format: one JSON object a line. Knows files; knows no tokens.

The format: https://github.com/kvcache-ai/Mooncake, FAST25-release/traces. Files found in the wild are
compressed, begin with a byte order mark, end lines as Windows does, or have lines that are no JSON.
"""

import gzip
import io
import math
import sys
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO

import msgspec

from kvspan.errors import ConfigError
from kvspan.trace.row import BLOCK_TOKENS, Trace, TraceRow, num_blocks

_MS_PER_UNIT = {"ms": 1.0, "s": 1000.0}
_GZIP_MAGIC = b"\x1f\x8b"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_PUBLIC_BLOCK_TOKENS = (16, 512)  # of Qwen's traces and Mooncake's
_MAX_LENGTH = 2**31 - 1  # tokens: a position is an int32 in every engine there is


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    """How a file is to be understood.

    Args:
        block_tokens: tokens that an id stands for (`--trace-block-size`).
        timestamp_unit: `ms` or `s`.
        allow_prefix_hashes: whether a row may have fewer ids than blocks; none at all is always allowed.
        skip_bad: leave bad lines out and count them.

    Raises:
        ConfigError: a value is none of these.
    """

    block_tokens: int = BLOCK_TOKENS
    timestamp_unit: str = "ms"
    allow_prefix_hashes: bool = False
    skip_bad: bool = False

    def __post_init__(self) -> None:
        if self.block_tokens < 1:
            raise ConfigError(f"--trace-block-size {self.block_tokens} is too small: 1 or more.")
        if self.timestamp_unit not in _MS_PER_UNIT:
            units = " or ".join(_MS_PER_UNIT)
            raise ConfigError(f"--timestamp-unit {self.timestamp_unit} is unknown: it is {units}.")


STRICT = ReadOptions()
"""The format as it is published."""


def read_trace(path: Path, options: ReadOptions = STRICT) -> Trace:
    """Reads a trace file, gzip-compressed or not.

    Args:
        path: the file.
        options: how to understand it.

    Returns:
        Its rows, sorted by time; rows of the same time stay in the file's order.

    Raises:
        ConfigError: it cannot be read, has no rows, or has a bad line, which the sentence names.
    """
    rows, num_skipped = [], 0
    for number, line in _lines(path):
        try:
            rows.append(_row(line, options))
        except ValueError as error:
            if not options.skip_bad:
                raise ConfigError(
                    f"{path}, line {number}: {error}. Mend the line, or leave bad lines out with "
                    "--skip-bad."
                ) from None
            num_skipped += 1
    if not rows:
        raise ConfigError(f"The trace {path} has no rows ({num_skipped} bad lines skipped).")
    num_unsorted = sum(after.timestamp_ms < before.timestamp_ms for before, after in pairwise(rows))
    rows.sort(key=lambda row: row.timestamp_ms)
    return Trace(tuple(rows), options.block_tokens, num_skipped, num_unsorted)


def write_trace(rows: Iterable[TraceRow], path: Path) -> None:
    """Writes rows as the public files are written, and the same bytes for the same rows.

    Args:
        rows: in order of time.
        path: ends in `.gz` to compress; `-` is stdout.

    Raises:
        ConfigError: it cannot be written.
    """
    body = b"".join(map(_line, rows))
    if str(path) == "-":
        sys.stdout.write(body.decode())
        return
    try:
        path.write_bytes(gzip.compress(body, mtime=0) if path.suffix == ".gz" else body)
    except OSError as error:
        raise ConfigError(f"The trace {path} cannot be written: {error.strerror}.") from None


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Number and content of each line that is not blank; numbers count from 1 and count blank ones."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(_plain(file), start=1):
                content = (line.removeprefix(_BYTE_ORDER_MARK) if number == 1 else line).strip()
                if content:
                    yield number, content
    except (OSError, EOFError, zlib.error) as error:  # gzip's BadGzipFile is an OSError
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"The trace {path} cannot be read: {reason}.") from None


def _plain(file: BinaryIO) -> BinaryIO:
    """A file's content, unpacked if it is compressed, whatever it is called."""
    magic = file.read(len(_GZIP_MAGIC))
    file.seek(0)
    return io.BufferedReader(gzip.GzipFile(fileobj=file)) if magic == _GZIP_MAGIC else file


class _Line(msgspec.Struct):
    """One line as JSON; other keys that public files have are passed over."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...] | None = None


_DECODER = msgspec.json.Decoder(_Line)


def _row(line: bytes, options: ReadOptions) -> TraceRow:
    """Reads a line.

    Raises:
        ValueError: the rest of a sentence, without its full stop.
    """
    try:
        read = _DECODER.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"it is no row of a trace: {str(error).rstrip('.')}") from None
    for name, length in (("input_length", read.input_length), ("output_length", read.output_length)):
        if not 1 <= length <= _MAX_LENGTH:
            raise ValueError(f"{name} is {length}, and must be from 1 to {_MAX_LENGTH}")
    row = TraceRow(
        timestamp_ms=read.timestamp * _MS_PER_UNIT[options.timestamp_unit],
        input_length=read.input_length,
        output_length=read.output_length,
        hash_ids=read.hash_ids or (),
    )
    if not math.isfinite(row.timestamp_ms):
        raise ValueError(f"timestamp is {read.timestamp}, which is no time")
    _check_ids(row, options)
    return row


def _check_ids(row: TraceRow, options: ReadOptions) -> None:
    """Refuses ids that are none, or that are not as many as the prompt has blocks."""
    if bad := [i for i in row.hash_ids if not 0 <= i < 2**64]:
        raise ValueError(f"hash_ids has {bad[0]}, and ids are whole numbers from 0 to 2^64 - 1")
    found, wanted = len(row.hash_ids), num_blocks(row.input_length, options.block_tokens)
    if found == wanted or not found or (found < wanted and options.allow_prefix_hashes):
        return
    ways_out = [
        f"--trace-block-size {size} fits"
        for size in _PUBLIC_BLOCK_TOKENS
        if size != options.block_tokens and num_blocks(row.input_length, size) == found
    ]
    if found < wanted:
        ways_out.append("--allow-prefix-hashes allows fewer")
    raise ValueError(
        f"an input_length of {row.input_length} is {wanted} blocks of {options.block_tokens} tokens, "
        f"but hash_ids has {found}" + (f" ({'; '.join(ways_out)})" if ways_out else "")
    )


def _line(row: TraceRow) -> bytes:
    """A row as a line; a whole timestamp is written as a whole number, as the public files do."""
    time_ms = float(row.timestamp_ms)
    fields = {
        "timestamp": int(time_ms) if time_ms.is_integer() else time_ms,
        "input_length": row.input_length,
        "output_length": row.output_length,
        "hash_ids": row.hash_ids,
    }
    return msgspec.json.format(msgspec.json.encode(fields), indent=0) + b"\n"
