"""Quantised checkpoints as if they were not: tensors that belong together become the weight they mean.

Knows a config's `quantization_config` and tensors by name. Knows no files and no models.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvspan.config.reader import Reader
from kvspan.errors import ModelError
from kvspan.loading.lazy import LazyTensor
from kvspan.loading.schemes import Awq, BlockScaled, Gptq, PackedGroups, Parts, Scheme
from kvspan.topology import Span


@dataclass(frozen=True, slots=True)
class QuantisedTensor:
    """A weight that is stored in parts.

    Args:
        name: of the weight.
        shape: of the weight.
        where: the file of its first part.
        parts: the stored tensors.
        scheme: what they mean.
    """

    name: str
    shape: tuple[int, ...]
    where: str
    parts: Parts
    scheme: Scheme

    def read(self, take: Sequence[Span]) -> Tensor:
        """Reads one part, bfloat16; see `LazyTensor.read`."""
        rows, columns = take
        return self.scheme.read(self.parts, rows, columns).to(torch.bfloat16)


def parse_scheme(config: Mapping[str, Any], *, where: str) -> Scheme | None:
    """How a config says that weights are stored; None = as they are.

    Args:
        config: of the text model.
        where: file to name in errors.

    Raises:
        ModelError: in a way that kvspan does not know.
    """
    quantisation = Reader(config, where).get("quantization_config", dict, default=None)
    if quantisation is None:
        return None
    read = Reader(quantisation, f"{where} (quantization_config)")
    method = read.one_of("quant_method", tuple(_METHODS), default="without a name")
    return _METHODS[method](read)


def joined(stored: Iterable[LazyTensor], scheme: Scheme) -> Iterator[LazyTensor]:
    """The weights that stored tensors mean; tensors that are no part of one come as they are.

    Args:
        stored: every tensor of a checkpoint.
        scheme: how it stores weights.

    Raises:
        ModelError: a part is missing, or has not the shape that the others ask for.
    """
    by_name = {tensor.name: tensor for tensor in stored}
    layers = {_split(name)[0] for name in by_name if _split(name)[1] in scheme.needed[:1]}
    for name, tensor in by_name.items():
        layer, part = _split(name)
        if layer not in layers or part not in scheme.needed + scheme.optional:
            yield tensor
        elif part == scheme.needed[0]:
            yield _join(layer, by_name, scheme)


def _split(name: str) -> tuple[str, str]:
    """The layer and the part of a tensor's name."""
    layer, _, part = name.rpartition(".")
    return layer, part


def _join(layer: str, by_name: Mapping[str, LazyTensor], scheme: Scheme) -> QuantisedTensor:
    names = scheme.needed + scheme.optional
    parts = {part: by_name[f"{layer}.{part}"] for part in names if f"{layer}.{part}" in by_name}
    first = parts[scheme.needed[0]]
    for part in scheme.needed:
        if part not in parts:
            raise ModelError(f"{first.where}: the tensor {first.name} is there without {layer}.{part}.")
    shape, wanted = scheme.shapes(parts)
    for part, tensor in parts.items():
        if tensor.shape != wanted.get(part, tensor.shape):
            raise ModelError(
                f"{tensor.where}: the tensor {tensor.name} has shape {list(tensor.shape)}, and a weight "
                f"of {list(shape)} asks for {list(wanted[part])}."
            )
    return QuantisedTensor(f"{layer}.weight", shape, first.where, parts, scheme)


def _fp8(read: Reader) -> Scheme:
    read.one_of("fmt", ("e4m3",), default="e4m3")
    block = read.required("weight_block_size", list)
    if len(block) != 2 or not all(isinstance(n, int) and n > 0 for n in block):
        raise ModelError(f'{read.where}: "weight_block_size" {block} is not two sizes.')
    return BlockScaled((block[0], block[1]))


def _compressed_tensors(read: Reader) -> Scheme:
    read.one_of("format", ("pack-quantized",), default="without a name")
    groups = read.get("config_groups", dict, default={"all": {"weights": dict(read.raw)}})
    if len(groups) != 1:
        raise ModelError(f"{read.where}: {len(groups)} config_groups, and kvspan reads one.")
    ((name, group),) = groups.items()
    weights = Reader(
        Reader(group, f"{read.where} {name}").required("weights", dict), f"{read.where} {name}"
    )
    _check_bits(weights, "num_bits" if weights.has("num_bits") else "bits")
    if not weights.get("symmetric", bool, default=True):
        raise ModelError(f"{weights.where}: weights with zero points are not there yet.")
    return PackedGroups(weights.positive("group_size"))


def _awq(read: Reader) -> Scheme:
    _check_bits(read, "bits" if read.has("bits") else "w_bit")
    version = read.get("version", str, default="gemm")
    if version.lower() != "gemm" or not read.get("zero_point", bool, default=True):
        raise ModelError(f'{read.where}: awq of version "{version}" (has gemm with zero points).')
    return Awq(read.positive("group_size" if read.has("group_size") else "q_group_size"))


def _gptq(read: Reader) -> Scheme:
    _check_bits(read, "bits")
    version = read.one_of("checkpoint_format", ("gptq", "gptq_v2"), default="gptq")
    size = read.required("group_size", int)
    return Gptq(size if size > 0 else None, zero_offset=int(version == "gptq"))


def _check_bits(read: Reader, key: str) -> None:
    if (bits := read.positive(key)) != 4:
        raise ModelError(f"{read.where}: weights of {bits} bits (has 4).")


_METHODS: dict[str, Callable[[Reader], Scheme]] = {
    "fp8": _fp8,
    "compressed-tensors": _compressed_tensors,
    "awq": _awq,
    "gptq": _gptq,
}
"""quant_method -> how it stores weights."""
