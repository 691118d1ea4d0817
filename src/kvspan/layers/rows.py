"""What happens to rows between linear layers: in native kernels of one pass, or in torch operators; and
how rows of several kinds, or of several ranks, come together.

Both variants of an operator round at the same places, so that they differ by the last bit of a float32
at the most.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from kvspan.comm.group import Group
from kvspan.native import extension, native_path

MOST_HEAD_ROWS = 16
"""For which products by head are native; of more rows they are arithmetic, and torch is faster."""


class RowOps(Protocol):
    """Operators on rows."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """[..., size] -> the same: a root mean square of 1, times `weight` [size]."""
        ...

    def add_rms_norm(self, x: Tensor, more: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x += more, both [R, size]; then as `rms_norm` of x."""
        ...

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """[R, 2 * size], gate and up side by side -> silu(gate) * up, [R, size]."""
        ...

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
        """Turns pairs of each head's last elements, and copies what comes before them.

        Args:
            x: [R, H, D].
            cos: [R, 1, d / 2] float32, of the last d of D elements.
            sin: [R, 1, d / 2] float32.
            interleaved: whether pairs are (2i, 2i + 1) of those d, or (i, i + d / 2), as they are in
                what comes out either way.

        Returns:
            [R, H, D].
        """
        ...

    def head_sums(self, x: Tensor, weight: Tensor) -> Tensor:
        """[R, H, n] and [H, n, m] -> [R, H, m]: a head's rows of the weight, times x and summed."""
        ...

    def head_dots(self, x: Tensor, weight: Tensor) -> Tensor:
        """[R, H, m] and [H, n, m] -> [R, H, n]: products of x with a head's rows of the weight."""
        ...

    def side_by_side(self, parts: Sequence[Tensor]) -> Tensor:
        """[..., n], [..., m], ... of one dtype -> [..., n + m + ...], a copy."""
        ...


class TorchRowOps:
    """Any dtype, any device."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `RowOps`."""
        exact = x.float()
        scale = torch.rsqrt(exact.square().mean(dim=-1, keepdim=True) + eps)
        return weight * (exact * scale).to(x.dtype)

    def add_rms_norm(self, x: Tensor, more: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `RowOps`."""
        return self.rms_norm(x.add_(more), weight, eps)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """See `RowOps`."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
        """See `RowOps`."""
        first = x.shape[-1] - 2 * cos.shape[-1]
        turned = x[..., first:].float()
        a, b = (turned[..., ::2], turned[..., 1::2]) if interleaved else turned.chunk(2, dim=-1)
        made = torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)
        return torch.cat([x[..., :first], made], dim=-1)

    def head_sums(self, x: Tensor, weight: Tensor) -> Tensor:
        """See `RowOps`."""
        return torch.einsum("rhn,hnm->rhm", x, weight)

    def head_dots(self, x: Tensor, weight: Tensor) -> Tensor:
        """See `RowOps`."""
        return torch.einsum("rhm,hnm->rhn", x, weight)

    def side_by_side(self, parts: Sequence[Tensor]) -> Tensor:
        """See `RowOps`."""
        return torch.cat(list(parts), dim=-1)


class NativeRowOps:
    """bf16, fp16 and float32 on a CPU.

    Args:
        isa: whose kernels run.
    """

    def __init__(self, isa: str) -> None:
        self._native = extension()
        self._isa = self._native.Isa[isa]
        self._dtypes = {
            torch.float32: self._native.Dtype.f32,
            torch.bfloat16: self._native.Dtype.bf16,
            torch.float16: self._native.Dtype.f16,
        }

    def takes(self, x: Tensor) -> bool:
        """Whether it serves rows like these."""
        return x.device.type == "cpu" and x.dtype in self._dtypes

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `RowOps`."""
        dense = _dense(x)
        heads = dense if x.dim() == 3 else dense.reshape(-1, 1, x.shape[-1])
        return self._norm(heads, 0, weight, eps).view(x.shape)

    def add_rms_norm(self, x: Tensor, more: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `RowOps`."""
        assert x.stride(1) == 1, "a sum is written over its first term"
        assert x.dtype == more.dtype, "the native kernels read one dtype"
        more = more.contiguous()
        return self._norm(x[:, None], more.data_ptr(), weight, eps)[:, 0]

    def _norm(self, heads: Tensor, more: int, weight: Tensor, eps: float) -> Tensor:
        """[R, heads, size]: each vector by itself."""
        assert weight.dtype == heads.dtype, "the native kernels read one dtype"
        out = torch.empty(heads.shape, dtype=heads.dtype)
        num_rows, num_heads, size = heads.shape
        self._native.rms_norm(
            *self._how(heads),
            heads.data_ptr(),
            num_rows,
            *heads.stride()[:2],
            num_heads,
            more,
            size,
            weight.data_ptr(),
            eps,
            out.data_ptr(),
        )
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """See `RowOps`."""
        rows = _dense(gate_up)
        out = gate_up.new_empty(len(rows), rows.shape[1] // 2)
        num_rows, stride, width = _size_and_stride(rows)
        self._native.silu_mul(
            *self._how(rows), rows.data_ptr(), num_rows, stride, width // 2, out.data_ptr()
        )
        return out

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
        """See `RowOps`."""
        heads, turned = _dense(x), 2 * cos.shape[-1]
        out = torch.empty(x.shape, dtype=x.dtype)
        num_rows, num_heads, dim = heads.shape
        self._native.rotate(
            *self._how(heads),
            heads.data_ptr(),
            num_rows,
            *heads.stride()[:2],
            num_heads,
            dim - turned,
            turned,
            interleaved,
            cos.data_ptr(),
            sin.data_ptr(),
            out.data_ptr(),
        )
        return out

    def head_sums(self, x: Tensor, weight: Tensor) -> Tensor:
        """See `RowOps`."""
        if len(x) > MOST_HEAD_ROWS:
            return _TORCH.head_sums(x, weight)
        return self._by_head(self._native.head_sums, x, weight, weight.shape[2])

    def head_dots(self, x: Tensor, weight: Tensor) -> Tensor:
        """See `RowOps`."""
        if len(x) > MOST_HEAD_ROWS:
            return _TORCH.head_dots(x, weight)
        return self._by_head(self._native.head_dots, x, weight, weight.shape[1])

    def _by_head(
        self, product: Callable[..., None], x: Tensor, weight: Tensor, num_outputs: int
    ) -> Tensor:
        assert weight.dtype == x.dtype, "the native kernels read one dtype"
        assert weight.stride(2) == 1, "a weight lies as it was loaded"
        heads = _dense(x)
        num_rows, num_heads, num_inputs = heads.shape
        out = torch.empty(num_rows, num_heads, num_outputs, dtype=x.dtype)
        product(
            *self._how(heads),
            heads.data_ptr(),
            num_rows,
            *heads.stride()[:2],
            num_heads,
            num_inputs,
            num_outputs,
            weight.data_ptr(),
            *weight.stride()[:2],
            out.data_ptr(),
        )
        return out

    def side_by_side(self, parts: Sequence[Tensor]) -> Tensor:
        """See `RowOps`."""
        shape, size = parts[0].shape[:-1], parts[0].itemsize
        parts = [_dense(part).flatten(0, -2) for part in parts]
        num_rows, width = len(parts[0]), sum(part.shape[1] for part in parts)
        out = parts[0].new_empty(num_rows, width)
        self._native.side_by_side(
            torch.get_num_threads(),
            [(part.data_ptr(), part.shape[1] * size, part.stride(0) * size) for part in parts],
            num_rows,
            out.data_ptr(),
        )
        return out.view(*shape, width)

    def _how(self, x: Tensor) -> tuple[object, object, int]:
        return self._isa, self._dtypes[x.dtype], torch.get_num_threads()


def some_rows(x: Tensor, rows: slice | Tensor) -> Tensor:
    """x[rows], which is `x` itself where that is all of it: a step often has rows of one kind alone."""
    return x if are_all(rows, len(x)) else x[rows]


def are_all(rows: slice | Tensor, num_rows: int) -> bool:
    """Whether `rows` names all of `num_rows` rows in order."""
    return isinstance(rows, slice) and rows == slice(0, num_rows)


def follow_one_another(num_rows: int, parts: Sequence[slice | Tensor]) -> bool:
    """Whether parts name all of `num_rows` rows in order, each a run of them; a run may be empty."""
    at = 0
    for rows in parts:
        if not isinstance(rows, slice) or (rows.stop > rows.start and rows.start != at):
            return False
        at = max(at, rows.stop)
    return at == num_rows


def below_each_other(parts: Sequence[Tensor]) -> Tensor:
    """Rows of several tensors [n, ...] in one; copied unless one tensor has all of them."""
    some = [part for part in parts if len(part)] or parts[:1]
    if len(some) == 1:
        return some[0]
    flat = [packed(part).view(1, -1) for part in some]
    return row_ops(some[0]).side_by_side(flat).view(-1, *some[0].shape[1:])


def packed(x: Tensor) -> Tensor:
    """[n, ...] without gaps between rows; copied if there are any."""
    return x if x.is_contiguous() else row_ops(x).side_by_side([x.flatten(1)]).view(x.shape)


def together(num_rows: int, parts: Sequence[tuple[slice | Tensor, Tensor]]) -> Tensor:
    """Rows of several kinds in one tensor; copied unless one kind has all of them.

    Args:
        num_rows: R.
        parts: at least one: which rows, and what they are [n, ...]; together each row once.

    Returns:
        [R, ...].
    """
    if follow_one_another(num_rows, [rows for rows, _ in parts]):
        return below_each_other([part for _, part in parts])
    out = parts[0][1].new_empty(num_rows, *parts[0][1].shape[1:])
    for rows, part in parts:
        out[rows] = part
    return out


def among(num_rows: int, rows: slice | Tensor, part: Tensor, *, rest: Tensor | None) -> Tensor:
    """Rows put among others; copied unless they are all.

    Args:
        num_rows: R.
        rows: which of them `part` is.
        part: [n, size].
        rest: [size], what the other rows are; None = zeros.

    Returns:
        [R, size].
    """
    if are_all(rows, num_rows):
        return part
    out = part.new_zeros(num_rows, part.shape[1])
    if rest is not None:
        out += rest
    out[rows] = part
    return out


def gather_rows(group: Group, sizes: Sequence[int], *tensors: Tensor) -> list[Tensor]:
    """Puts everybody's rows one below the other.

    Args:
        group: who has the others.
        sizes: rows of each rank of the group that are gathered.
        tensors: [n, ...], this rank's rows; those after the first sizes[rank] stay here alone.

    Returns:
        [sum of sizes + n - sizes[rank], ...] of each: everybody's rows, and then those that stayed.
    """
    if group.size == 1 or not any(sizes):  # alone, they are in order; with none, so all ranks see it
        return list(tensors)
    own = sizes[group.rank]
    under_way = [group.all_gather(packed(x[:own]), sizes) for x in tensors]
    gathered = [pending.wait() for pending in under_way]
    return [below_each_other([every, x[own:]]) for every, x in zip(gathered, tensors, strict=True)]


def row_ops(x: Tensor) -> RowOps:
    """The fastest operators for rows like `x`."""
    native = _native_row_ops()
    return native if native is not None and native.takes(x) else _TORCH


@cache
def _native_row_ops() -> NativeRowOps | None:
    isa = native_path().isa
    return None if isa is None else NativeRowOps(isa)


def _dense(x: Tensor) -> Tensor:
    """`x`, copied if its last dim has gaps."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _size_and_stride(rows: Tensor) -> tuple[int, int, int]:
    return rows.shape[0], rows.stride(0), rows.shape[1]


_TORCH = TorchRowOps()
