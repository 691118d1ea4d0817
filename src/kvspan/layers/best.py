"""The most probable token of each row. Knows no sampling."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvspan.native import extension, native_path


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
