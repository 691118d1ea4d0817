"""Checkpoints as safetensors files: one, or shards with an index. Knows no model.

Each shard is memory-mapped, and of a tensor only the part that is asked for is read.
"""

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from safetensors import SafetensorError, safe_open
from torch import Tensor

from kvspan.config.model import text_config
from kvspan.errors import ModelError
from kvspan.loading.hf_files import read_json, read_raw_config
from kvspan.loading.lazy import LazyTensor
from kvspan.loading.quantised import joined, parse_scheme
from kvspan.loading.schemes import Scheme
from kvspan.topology import Span

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

_FLOATS = {"F64", "F32", "F16", "BF16"}
_LISTED = 3
"""Tensors of a missing shard that the error lists."""


class _Slice(Protocol):
    """What the library, which has no types, calls a slice: a tensor that is not read yet."""

    def get_shape(self) -> list[int]: ...
    def get_dtype(self) -> str: ...
    def __getitem__(self, part: tuple[slice, ...]) -> Tensor: ...


class _File(Protocol):
    """An open file of the library."""

    def keys(self) -> list[str]: ...
    def get_slice(self, name: str) -> _Slice: ...


@dataclass(frozen=True, slots=True)
class SafetensorsSlice:
    """A tensor of a safetensors file.

    Args:
        name: its name in the file.
        shape: its whole shape.
        where: the file.
        dtype: as the file calls it, e.g. `BF16`.
        handle: the open file.
    """

    name: str
    shape: tuple[int, ...]
    where: str
    dtype: str
    handle: _File

    def read(self, take: Sequence[Span]) -> Tensor:
        """Reads one part; see `LazyTensor.read`."""
        part = tuple(slice(span.start, span.stop) for span in take)
        return self.handle.get_slice(self.name)[part]


@dataclass(frozen=True, slots=True)
class SafetensorsCheckpoint:
    """A Hugging Face directory with safetensors files.

    Args:
        raw_config: what its `config.json` says.
        where: the directory.
        shards: file -> names that the index puts there; without an index it puts none.
        scheme: how weights are stored; None = as they are.
    """

    raw_config: Mapping[str, Any]
    where: str
    shards: Mapping[Path, Sequence[str]]
    scheme: Scheme | None = None

    def tensors(self, _wanted: Mapping[str, tuple[int, ...]], /) -> Iterator[LazyTensor]:
        """All weights of all shards, file by file.

        Raises:
            ModelError: a file is broken, lacks what the index promises, or holds other than floats and
                the parts of quantised weights.
        """
        stored = self._stored()
        for tensor in stored if self.scheme is None else joined(stored, self.scheme):
            if isinstance(tensor, SafetensorsSlice) and tensor.dtype not in _FLOATS:
                raise ModelError(
                    f"{tensor.where}: the tensor {tensor.name} has dtype {tensor.dtype} (kvspan reads "
                    f"{', '.join(sorted(_FLOATS))})."
                )
            yield tensor

    def _stored(self) -> Iterator[SafetensorsSlice]:
        for path, promised in self.shards.items():
            handle = _open(path)
            names = handle.keys()
            if lost := sorted(set(promised).difference(names)):
                raise ModelError(f"{path} lacks the tensor {lost[0]}, which {INDEX} says is in it.")
            yield from (_tensor(path, handle, name) for name in names)


def open_safetensors(directory: Path) -> SafetensorsCheckpoint:
    """Opens a Hugging Face directory.

    Args:
        directory: holds `config.json` and `model.safetensors`, or shards with their index.

    Raises:
        ModelError: a file is missing, or the weights are quantised in a way kvspan does not know.
    """
    raw_config = read_raw_config(directory)
    config = text_config(raw_config, where=str(directory))
    scheme = parse_scheme(config, where=str(directory))
    return SafetensorsCheckpoint(raw_config, str(directory), _find_shards(directory), scheme)


def _find_shards(directory: Path) -> dict[Path, list[str]]:
    """Files of the checkpoint -> names that must be in them."""
    if not (directory / INDEX).exists():
        if not (directory / SINGLE).exists():
            raise ModelError(f"{directory} has neither {SINGLE} nor {INDEX}.")
        return {directory / SINGLE: []}
    weight_map = read_json(directory / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(s, str) for s in weight_map.values()):
        raise ModelError(f'{directory / INDEX}: "weight_map" must map tensor names to files.')
    shards: defaultdict[Path, list[str]] = defaultdict(list)
    for name, shard in weight_map.items():
        shards[directory / shard].append(name)
    for path, names in sorted(shards.items()):
        if not path.exists():
            listed = ", ".join(names[:_LISTED]) + (", ..." if len(names) > _LISTED else "")
            raise ModelError(
                f"The shard {path} is missing; by {INDEX} it holds {len(names)} tensors ({listed})."
            )
    return dict(sorted(shards.items()))


def _open(path: Path) -> _File:
    try:
        handle: _File = safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ModelError(_diagnosis(path) or f"{path} cannot be read: {error}.") from error
    return handle


def _diagnosis(path: Path) -> str | None:
    """Why the library refused a file, when its bytes tell."""
    found_bytes = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        if prefix == b"version ":
            return f"{path} is a Git LFS pointer, not the file itself: run `git lfs pull`."
        header_bytes = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or header_bytes > found_bytes:
            return (
                f"{path} is no safetensors file, or is cut off: it has {found_bytes} bytes. Download it "
                "again."
            )
        header = file.read(header_bytes)
    try:
        ends = [
            entry["data_offsets"][1] for name, entry in json.loads(header).items() if name[:2] != "__"
        ]
        expected_bytes = 8 + header_bytes + max(ends, default=0)
    except (ValueError, LookupError, TypeError, AttributeError):
        return None
    if expected_bytes == found_bytes:
        return None
    return f"{path} has {found_bytes} bytes, and its header says {expected_bytes}: download it again."


def _tensor(path: Path, handle: _File, name: str) -> SafetensorsSlice:
    tensor = handle.get_slice(name)
    return SafetensorsSlice(name, tuple(tensor.get_shape()), str(path), tensor.get_dtype(), handle)
