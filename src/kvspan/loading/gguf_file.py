"""The GGUF container: metadata and where each tensor's bytes lie. Knows no model and no names.

Written after the specification, https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The `gguf`
package has a reader too, but it makes a numpy array of every token and merge of the vocabulary, which
takes every rank seconds; reading them as strings takes a tenth of that.
"""

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from kvspan.errors import ModelError

_STRING, _ARRAY = 8, 9
_SCALARS = dict(enumerate(("B", "b", "H", "h", "I", "i", "f", "?"))) | {10: "Q", 11: "q", 12: "d"}
"""Number of a metadata type -> its `struct` (and numpy) letter."""

_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor lies and how it is packed.

    Args:
        name: its name in the file.
        shape: outermost dim first, as torch counts them (GGUF writes them the other way round).
        kind: how values are packed: blocks of some values of the innermost dim.
        blocks: [*shape[:-1], blocks of a row, bytes of a block] uint8, memory-mapped.
    """

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    blocks: npt.NDArray[np.uint8]

    @property
    def block_values(self) -> int:
        """Values of the innermost dim that are packed together; 1 if it is not quantised."""
        return int(GGML_QUANT_SIZES[self.kind][0])


@dataclass(frozen=True, slots=True)
class GgufFile:
    """What a GGUF file holds.

    Args:
        where: the file.
        metadata: key -> number, bool, string or list.
        tensors: in the order of the file.
    """

    where: str
    metadata: Mapping[str, Any]
    tensors: tuple[StoredTensor, ...]


def read_gguf(path: Path) -> GgufFile:
    """Reads a GGUF file's metadata and maps its tensors.

    Args:
        path: a file of version 2 or 3, little-endian.

    Raises:
        ModelError: it is something else, is cut off, or is packed in a way kvspan does not know.
    """
    try:
        with path.open("rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:  # ValueError: an empty file
        raise ModelError(f"{path} cannot be read: {error}.") from error
    cursor = _Cursor(data)
    try:
        num_tensors, num_keys = _read_opening(cursor, str(path))
        metadata = {cursor.string(): cursor.value(cursor.scalar("I")) for _ in range(num_keys)}
        headers = [_read_header(cursor) for _ in range(num_tensors)]
    except (struct.error, ValueError, OverflowError) as error:
        if isinstance(error, ModelError):
            raise
        raise ModelError(
            f"{path} is broken or cut off: its header does not end in its {len(data)} bytes ({error})."
        ) from error
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    base = -(-cursor.at // alignment) * alignment
    tensors = tuple(_map_tensor(data, header, base=base, where=str(path)) for header in headers)
    return GgufFile(str(path), metadata, tensors)


class _Cursor:
    """Reads values one after another. A read over the end is a `struct.error` or a `ValueError`."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.at = 0

    def scalar(self, letter: str) -> Any:
        """One little-endian value of a `struct` letter."""
        (value,) = struct.unpack_from(f"<{letter}", self.data, self.at)
        self.at += struct.calcsize(f"<{letter}")
        return value

    def string(self) -> str:
        """A length and so many bytes of UTF-8."""
        size = self.scalar("Q")
        text = self.data[self.at : self.at + size]
        if len(text) < size:
            raise ValueError(f"a string of {size} bytes at byte {self.at}")
        self.at += size
        return text.decode()

    def value(self, kind: int) -> Any:
        """A metadata value; `kind` is the number of its type."""
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self._array(self.scalar("I"), self.scalar("Q"))
        return self.scalar(self._letter(kind))

    def _array(self, kind: int, count: int) -> list[Any]:
        if kind == _STRING:
            return [self.string() for _ in range(count)]
        dtype = np.dtype(self._letter(kind)).newbyteorder("<")
        values = np.frombuffer(self.data, dtype, count, self.at)
        self.at += values.nbytes
        return list(values.tolist())

    @staticmethod
    def _letter(kind: int) -> str:
        if kind not in _SCALARS:
            raise ValueError(f"unknown metadata type {kind}")
        return _SCALARS[kind]


@dataclass(frozen=True, slots=True)
class _Header:
    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int  # from the first tensor's


def _read_opening(cursor: _Cursor, where: str) -> tuple[int, int]:
    """Checks magic and version, and returns the numbers of tensors and of keys."""
    if cursor.data[:4] != b"GGUF":
        raise ModelError(f"{where} is no GGUF file: it begins with {cursor.data[:4]!r}.")
    cursor.at = 4
    if (version := cursor.scalar("I")) not in _VERSIONS:
        raise ModelError(
            f"{where} is GGUF of version {version}, or big-endian (kvspan reads versions 2 and 3, "
            "little-endian): convert it again with a current llama.cpp."
        )
    return cursor.scalar("Q"), cursor.scalar("Q")


def _read_header(cursor: _Cursor) -> _Header:
    name = cursor.string()
    shape = tuple(cursor.scalar("Q") for _ in range(cursor.scalar("I")))
    return _Header(name, shape[::-1], kind=cursor.scalar("I"), offset=cursor.scalar("Q"))


def _map_tensor(data: mmap.mmap, header: _Header, *, base: int, where: str) -> StoredTensor:
    """Views a tensor's blocks in the file."""
    try:
        kind = GGMLQuantizationType(header.kind)
        block_values, block_bytes = GGML_QUANT_SIZES[kind]
    except (ValueError, KeyError):
        raise ModelError(
            f"{where}: the tensor {header.name} is of the unknown quantisation type {header.kind}."
        ) from None
    if not prod(header.shape):
        raise ModelError(f"{where}: the tensor {header.name} is empty, of shape {list(header.shape)}.")
    *outer, width = header.shape or (1,)
    if width % block_values:
        raise ModelError(
            f"{where}: rows of {width} values of {header.name} are no whole {kind.name} blocks."
        )
    shape = (*outer, width // block_values, block_bytes)
    start, size = base + header.offset, prod(shape)
    if start + size > len(data):
        raise ModelError(
            f"{where} is cut off: the tensor {header.name} ends at byte {start + size}, and the file "
            f"has {len(data)} bytes. Download it again."
        )
    blocks = np.frombuffer(data, np.uint8, size, start).reshape(shape)
    return StoredTensor(header.name, (*outer, width), kind, blocks)
