"""How checkpoints store the weight of a linear layer in fewer bits, and the weight that they mean.

A scheme stores a weight [outputs, inputs] as several tensors, `layer.<part>` for each of its parts. Any
rectangle of the weight is read from the rectangles of the parts that it needs, whatever blocks, groups
or 32-bit words its borders cut. Knows no files and no models.

    fp8 (DeepSeek)       weight: e4m3; weight_scale_inv: of blocks of 128 x 128, the last ones ragged
    compressed-tensors   weight_packed: 8 inputs a word; weight_scale for a group of inputs; weight_shape
    awq                  transposed. qweight: 8 outputs a word, in an order of its own; qzeros, scales
    gptq                 transposed. qweight: 8 inputs a word; qzeros: 8 outputs a word; scales; g_idx
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from kvspan.loading.lazy import LazyTensor
from kvspan.topology import Span

PER_WORD = 8
"""Values of 4 bits in a word of 32."""

_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""In which 4 bits of its word AWQ keeps each of 8 outputs."""

Parts = Mapping[str, LazyTensor]
Shape = tuple[int, ...]


class Scheme(Protocol):
    """A way to store weights."""

    @property
    def needed(self) -> tuple[str, ...]:
        """Names of parts; a layer that has the first is stored so, and must have the others."""
        ...

    @property
    def optional(self) -> tuple[str, ...]:
        """Names of parts that it may have."""
        ...

    def shapes(self, parts: Parts) -> tuple[Shape, Mapping[str, Shape]]:
        """Shape of the weight, and the shapes that its parts must then have."""
        ...

    def read(self, parts: Parts, rows: Span, columns: Span) -> Tensor:
        """[outputs, inputs] float32: a rectangle of the weight."""
        ...


@dataclass(frozen=True, slots=True)
class BlockScaled:
    """8-bit floats, with a scale for each block of outputs by inputs.

    Args:
        block: (outputs, inputs) of a block; the last ones may be smaller.
    """

    needed: ClassVar[tuple[str, ...]] = ("weight_scale_inv", "weight")
    optional: ClassVar[tuple[str, ...]] = ()

    block: tuple[int, int]

    def shapes(self, parts: Parts) -> tuple[Shape, Mapping[str, Shape]]:
        """See `Scheme.shapes`."""
        shape = parts["weight"].shape
        return shape, {
            "weight_scale_inv": tuple(-(-n // b) for n, b in zip(shape, self.block, strict=True))
        }

    def read(self, parts: Parts, rows: Span, columns: Span) -> Tensor:
        """See `Scheme.read`."""
        down, right = (_Groups(s, b) for s, b in zip((rows, columns), self.block, strict=True))
        scales = parts["weight_scale_inv"].read([down.span, right.span]).float()
        return parts["weight"].read([rows, columns]).float() * scales[down.of_each][:, right.of_each]


@dataclass(frozen=True, slots=True)
class PackedGroups:
    """4-bit whole numbers -8..7 of compressed-tensors, with a scale for each group of inputs.

    Args:
        group_size: inputs of a group.
    """

    needed: ClassVar[tuple[str, ...]] = ("weight_packed", "weight_scale")
    optional: ClassVar[tuple[str, ...]] = ("weight_shape",)

    group_size: int

    def shapes(self, parts: Parts) -> tuple[Shape, Mapping[str, Shape]]:
        """See `Scheme.shapes`."""
        outputs, packed = parts["weight_packed"].shape
        shape = (outputs, packed * PER_WORD)
        if "weight_shape" in parts:
            shape = tuple(parts["weight_shape"].read([Span(0, 2)]).tolist())
        outputs, inputs = shape
        return shape, {
            "weight_packed": (outputs, -(-inputs // PER_WORD)),
            "weight_scale": (outputs, -(-inputs // self.group_size)),
        }

    def read(self, parts: Parts, rows: Span, columns: Span) -> Tensor:
        """See `Scheme.read`."""
        words, groups = _Groups(columns, PER_WORD), _Groups(columns, self.group_size)
        packed = parts["weight_packed"].read([rows, words.span])
        values = words.cut(_unpacked(packed)) - 8
        return values * parts["weight_scale"].read([rows, groups.span]).float()[:, groups.of_each]


@dataclass(frozen=True, slots=True)
class Awq:
    """4-bit values less a zero point, by a scale, both of a group of inputs.

    Args:
        group_size: inputs of a group.
    """

    needed: ClassVar[tuple[str, ...]] = ("qweight", "qzeros", "scales")
    optional: ClassVar[tuple[str, ...]] = ()

    group_size: int

    def shapes(self, parts: Parts) -> tuple[Shape, Mapping[str, Shape]]:
        """See `Scheme.shapes`."""
        inputs, words = parts["qweight"].shape
        groups = -(-inputs // self.group_size)
        outputs = words * PER_WORD
        return (outputs, inputs), {"qzeros": (groups, words), "scales": (groups, outputs)}

    def read(self, parts: Parts, rows: Span, columns: Span) -> Tensor:
        """See `Scheme.read`."""
        words, groups = _Groups(rows, PER_WORD), _Groups(columns, self.group_size)
        values, zeros = (
            words.cut(_unpacked(parts[name].read([span, words.span]), _AWQ_PLACES))
            for name, span in (("qweight", columns), ("qzeros", groups.span))
        )
        scales = parts["scales"].read([groups.span, rows]).float()
        of_each = groups.of_each
        return ((values - zeros[of_each]) * scales[of_each]).t()


@dataclass(frozen=True, slots=True)
class Gptq:
    """4-bit values less a zero point, by a scale, both of a group of inputs that need not be neighbours.

    Args:
        group_size: inputs of a group; None = all are one group.
        zero_offset: what zero points are stored less by: 1, or 0 in the format's second version.
    """

    needed: ClassVar[tuple[str, ...]] = ("qweight", "qzeros", "scales")
    optional: ClassVar[tuple[str, ...]] = ("g_idx",)

    group_size: int | None
    zero_offset: int

    def shapes(self, parts: Parts) -> tuple[Shape, Mapping[str, Shape]]:
        """See `Scheme.shapes`."""
        words, outputs = parts["qweight"].shape
        inputs = words * PER_WORD
        groups = -(-inputs // (self.group_size or inputs))
        return (outputs, inputs), {
            "qzeros": (groups, -(-outputs // PER_WORD)),
            "scales": (groups, outputs),
            "g_idx": (inputs,),
        }

    def read(self, parts: Parts, rows: Span, columns: Span) -> Tensor:
        """See `Scheme.read`."""
        across, down = _Groups(columns, PER_WORD), _Groups(rows, PER_WORD)
        every_group = Span(0, parts["scales"].shape[0])
        values = across.cut(_unpacked(parts["qweight"].read([across.span, rows]).t()))
        zeros = down.cut(_unpacked(parts["qzeros"].read([every_group, down.span])))
        zeros = (zeros + self.zero_offset) % 16  # 15 stands for a zero point of 0
        scales = parts["scales"].read([every_group, rows]).float()
        of_each = self._group_of_each(parts, columns)
        return (values - zeros[of_each].t()) * scales[of_each].t()

    def _group_of_each(self, parts: Parts, columns: Span) -> Tensor:
        """[inputs]: the group of each input."""
        if "g_idx" in parts:
            return parts["g_idx"].read([columns]).long()
        inputs = torch.arange(columns.start, columns.stop)
        return inputs // self.group_size if self.group_size else torch.zeros_like(inputs)


@dataclass(frozen=True, slots=True)
class _Groups:
    """What a range of elements has to do with groups of `size` neighbours.

    Args:
        elements: the range.
        size: elements of a group.
    """

    elements: Span
    size: int

    @property
    def span(self) -> Span:
        """Groups that the range touches."""
        first = self.elements.start // self.size
        return Span(first, -(-self.elements.stop // self.size) if self.elements.size else first)

    @property
    def of_each(self) -> Tensor:
        """[n]: for each element, which of the touched groups it is in."""
        return torch.arange(self.elements.start, self.elements.stop) // self.size - self.span.start

    def cut(self, touched: Tensor) -> Tensor:
        """Of the elements of all touched groups, along the last dim, those of the range."""
        inside = self.elements.shifted(-self.span.start * self.size)
        return touched[..., inside.start : inside.stop]


def _unpacked(words: Tensor, places: tuple[int, ...] = tuple(range(PER_WORD))) -> Tensor:
    """[..., n] int32 -> [..., 8 n] int32 in 0..15; `places` says which 4 bits come first, second, ..."""
    shifts = 4 * torch.tensor(places, dtype=torch.int32)
    return ((words[..., None] >> shifts) & 15).flatten(-2)
