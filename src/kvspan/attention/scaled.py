"""Vectors of 8 bits an element, and the scales that make numbers of them.

Kernels that read such codes where they lie put a key's scale on its score and a value's on its weight.
Knows blocks by number.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

LIMITS = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""Dtypes of 8 bits -> the largest number that they hold."""
SCALE_DTYPE = torch.bfloat16
"""Vectors are divided by the scale as it is stored, so its own rounding costs nothing."""


@dataclass(frozen=True, slots=True)
class Scaled:
    """Vectors whose parts each have a scale.

    Args:
        codes: [..., D], of a dtype of `LIMITS`.
        scales: [..., P] of `SCALE_DTYPE`.
        parts: elements of each of the P parts; together they are D.
        dtype: of the computation, in which they are seen.
    """

    codes: Tensor
    scales: Tensor
    parts: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, vectors: Tensor, parts: tuple[int, ...], *, codes: torch.dtype) -> "Scaled":
        """Vectors [..., D] in codes of a dtype.

        An int8 is within 1/254 of the largest element of its part; an e4m3 within 1/16 of its own value,
        or, for elements under 2^-15 of the largest, within 2^-19 of that.
        """
        limit = LIMITS[codes]
        split = vectors.float().split_with_sizes(list(parts), dim=-1)
        largest = torch.stack([part.abs().amax(dim=-1) for part in split], dim=-1)  # [..., P]
        scales = (largest / limit).to(SCALE_DTYPE)
        scales = scales.masked_fill(scales == 0.0, 1.0)
        scaled = torch.cat(split, dim=-1) / _spread(scales, parts).float()
        whole = scaled if codes.is_floating_point else scaled.round()
        return cls(whole.clamp(-limit, limit).to(codes), scales, parts, vectors.dtype)

    @property
    def first_part(self) -> "Scaled":
        """The first part alone, a view."""
        size = self.parts[0]
        return Scaled(self.codes[..., :size], self.scales[..., :1], (size,), self.dtype)

    def written_out(self) -> Tensor:
        """[..., D] in `dtype`."""
        return self.codes.to(self.dtype) * _spread(self.scales, self.parts).to(self.dtype)

    def blocks(self, numbers: Tensor) -> Tensor:
        """[n, ..., D] in `dtype`: some blocks of [N, ..., D] written out."""
        return self._chosen((numbers,)).written_out()

    def slots(self, blocks: Tensor, offsets: Tensor) -> Tensor:
        """[n, Hkv, D] in `dtype`: some slots of [N, Hkv, B, D] written out."""
        return self._chosen((blocks, slice(None), offsets)).written_out()

    def _chosen(self, which: tuple[Tensor | slice, ...]) -> "Scaled":
        # Bytes, since not every device indexes elements of 8-bit floats.
        codes = self.codes.view(torch.uint8)[which].view(self.codes.dtype)
        return Scaled(codes, self.scales[which], self.parts, self.dtype)


def _spread(scales: Tensor, parts: Sequence[int]) -> Tensor:
    """[..., P] -> [..., D]: each element's scale."""
    sizes = torch.tensor(parts, device=scales.device)
    return scales.repeat_interleave(sizes, dim=-1, output_size=sum(parts))
