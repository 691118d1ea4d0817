"""Joins a checkpoint's tensors to a model's parameters. Knows no file format and no model.

Complete by construction: a name that only one side knows is an error, found before anything is read,
and every element of every parameter is counted as it is filled.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from kvspan.errors import ModelError
from kvspan.layers.parameter import Target
from kvspan.loading.lazy import Checkpoint, LazyTensor

_LISTED = 5
"""Names that an error lists; of the others it tells the number."""


def apply(
    checkpoint: Checkpoint,
    targets: Mapping[str, Target],
    parameters: Mapping[str, Tensor],
    *,
    ignored: Collection[str],
    prefix: str = "",
) -> None:
    """Fills a model's parameters with this rank's parts of a checkpoint.

    Args:
        checkpoint: where the tensors come from.
        targets: checkpoint name -> where its part goes; complete.
        parameters: the tensors to fill in place, by the dotted name that targets use. Values are
            cast to their dtype and moved to their device.
        ignored: checkpoint names that may be there and are not needed.
        prefix: what the model's names begin with; others belong to other towers, and are left alone.

    Raises:
        ModelError: the checkpoint lacks tensors, has unknown ones, or one has another shape. Nothing
            has been read then.
    """
    found = {n: t for n, t in _by_name(checkpoint, targets).items() if n.startswith(prefix)}
    _check_names(checkpoint.where, wanted=targets.keys(), found=found.keys() - set(ignored))
    for name, target in targets.items():
        _check_shape(found[name], target)
    filled: Counter[str] = Counter()
    for tensor in found.values():
        if tensor.name in targets:  # not so: an ignored one
            filled += _fill(tensor, targets[tensor.name], parameters)
    unfilled = {n: (filled[n], p.numel()) for n, p in parameters.items() if filled[n] != p.numel()}
    assert not unfilled, f"elements filled and to fill: {unfilled}"


def _by_name(checkpoint: Checkpoint, targets: Mapping[str, Target]) -> dict[str, LazyTensor]:
    """The checkpoint's tensors in its own order; a name that comes twice is an error."""
    found: dict[str, LazyTensor] = {}
    for tensor in checkpoint.tensors({name: target.shape for name, target in targets.items()}):
        if (other := found.setdefault(tensor.name, tensor)) is not tensor:
            raise ModelError(f"The tensor {tensor.name} is both in {other.where} and in {tensor.where}.")
    return found


def _check_names(where: str, *, wanted: Collection[str], found: Collection[str]) -> None:
    """Reports both differences in one sentence."""
    missing = [name for name in wanted if name not in found]
    unknown = sorted(name for name in found if name not in wanted)
    differences = []
    if missing:
        differences.append(f"lacks {_listed(missing)} that the model needs")
    if unknown:
        differences.append(f"has {_listed(unknown)} that the model does not know")
    if differences:
        raise ModelError(
            f"{where} {' and '.join(differences)}. Is its config.json (or metadata) that of its weights?"
        )


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return f"{len(names)} tensor{'s' * (len(names) > 1)} ({', '.join(names[:_LISTED])}{more})"


def _check_shape(tensor: LazyTensor, target: Target) -> None:
    if tensor.shape != target.shape:
        raise ModelError(
            f"{tensor.where}: the tensor {tensor.name} has shape {list(tensor.shape)}, "
            f"and the model's config asks for {list(target.shape)}."
        )


def _fill(tensor: LazyTensor, target: Target, parameters: Mapping[str, Tensor]) -> Counter[str]:
    """Copies one part to its place, and counts the elements."""
    if target.parameter is None:
        return Counter()
    with torch.no_grad():
        place = parameters[target.parameter][target.within]
        place = place[target.at : target.at + target.take[0].size]
        # copy_ would broadcast, and fill a place that does not fit
        assert place.shape == target.taken_shape, f"{target} has no room in {target.parameter}"
        if place.numel():
            place.copy_(tensor.read(target.take))
    return Counter({target.parameter: place.numel()})
