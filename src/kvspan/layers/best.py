"""The most probable token of each row, of logits that are whole or shared out. Knows no sampling."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvspan.comm.group import Group
from kvspan.native import extension, native_path
from kvspan.topology import Span


@dataclass(frozen=True, slots=True)
class Best:
    """The largest logit of each row.

    Args:
        values: [n] float32; NaN for a row that has one.
        tokens: [n] int64; of several alike the lowest.
    """

    values: Tensor
    tokens: Tensor


def best(logits: Tensor) -> Best:
    """The largest of each row: logits are [n, V] float32, of which V may be 0."""
    if logits.device.type != "cpu" or native_path().isa is None:
        padded = torch.nn.functional.pad(logits, (0, 1), value=-torch.inf)  # a row that has something
        return Best(padded.amax(-1), padded.argmax(-1))
    found = Best(logits.new_empty(len(logits)), torch.empty(len(logits), dtype=torch.int64))
    extension().best(
        torch.get_num_threads(),
        logits.data_ptr(),
        *logits.shape[:1],
        logits.stride(0),
        logits.shape[1],
        found.values.data_ptr(),
        found.tokens.data_ptr(),
    )
    return found


def best_of_parts(logits: Tensor, group: Group, parts: Sequence[Span]) -> Best:
    """The largest of rows whose logits are shared out: 16 bytes of a row travel, and no logits.

    Args:
        logits: [n, parts[rank].size] float32.
        group: who has the others.
        parts: which tokens each rank has, in order.

    Returns:
        The same on every rank.
    """
    mine, count = best(logits), len(logits)
    tokens = mine.tokens + parts[group.rank].start
    sent = torch.stack([mine.values.double(), tokens.double()])[None]  # [1, 2, n]; both are exact
    every = group.all_gather(sent, [1] * group.size).wait()  # [T, 2, n]
    whose = every[:, 0].argmax(0)  # a NaN is larger than all; of ranks alike the first
    values, chosen = every[whose, :, torch.arange(count, device=logits.device)].unbind(1)
    return Best(values.float(), chosen.long())
