"""Which part of a checkpoint's tensor fills which part of a parameter. Knows no loader and no file."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvspan.topology import Span


@dataclass(frozen=True, slots=True)
class Target:
    """Where a checkpoint's tensor goes on this rank.

    Args:
        parameter: dotted name of the model's parameter; None = this rank keeps nothing of the tensor.
        shape: shape that the whole tensor must have in the checkpoint.
        take: the part that this rank keeps, one span for each dim; it may be empty.
        at: row (of the dim after `within`) of the parameter where the part begins.
        within: places in the parameter's leading dims, e.g. of one expert among those stacked there.
    """

    parameter: str | None
    shape: tuple[int, ...]
    take: tuple[Span, ...]
    at: int = 0
    within: tuple[int, ...] = ()

    @property
    def taken_shape(self) -> tuple[int, ...]:
        """Shape of the part that this rank keeps."""
        return tuple(span.size for span in self.take)


def whole(parameter: str, shape: Sequence[int]) -> Target:
    """A tensor that every rank keeps whole."""
    return Target(parameter, tuple(shape), tuple(Span(0, n) for n in shape))


def elsewhere(shape: Sequence[int]) -> Target:
    """A tensor that other ranks keep: its name and shape are known here, and it is never read."""
    return Target(None, tuple(shape), tuple(Span(0, 0) for _ in shape))


def linear_targets(
    theirs: str, ours: str, shape: Sequence[int], *, dim: int, part: Span, at: int = 0, bias: bool
) -> dict[str, Target]:
    """A linear layer's weight, and its bias if it has one.

    Args:
        theirs: the layer's name in the checkpoint.
        ours: the layer's dotted name in the model.
        shape: (outputs, inputs) of the whole layer.
        dim: 0 if this rank keeps some outputs (and their bias), 1 if some inputs (and the whole bias).
        part: which outputs or inputs.
        at: row of our weight (and bias) where they begin.
        bias: whether there is one.
    """
    targets = {f"{theirs}.weight": sliced(f"{ours}.weight", shape, dim=dim, part=part, at=at)}
    if bias:
        kept = part if dim == 0 else Span(0, shape[0])
        targets[f"{theirs}.bias"] = sliced(f"{ours}.bias", shape[:1], dim=0, part=kept, at=at)
    return targets


def sliced(
    parameter: str,
    shape: Sequence[int],
    *,
    dim: int,
    part: Span,
    at: int = 0,
    within: tuple[int, ...] = (),
) -> Target:
    """A tensor of which this rank keeps `part` of `dim`, and all of every other dim."""
    take = tuple(part if d == dim else Span(0, n) for d, n in enumerate(shape))
    return Target(parameter, tuple(shape), take, at, within)
