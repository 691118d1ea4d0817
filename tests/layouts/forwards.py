"""What tests of forward passes share: tiny models by name, token ids, and logits that are one rank's."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kvspan.config.model import parse_model_config
from kvspan.errors import LayoutError
from kvspan.loading.resolve import resolve
from kvspan.testing.checkpoints import write_checkpoint
from kvspan.testing.forward import Forward, ForwardCase, forward
from kvspan.testing.tiny import KIMI, TINY
from kvspan.testing.tolerance import assert_within
from kvspan.topology import Topology, check_layout
from tests.conftest import SEED

CONFIGS = {**TINY, "kimi": KIMI}
ONE_RANK = ForwardCase()


def is_legal(name: str, topology: Topology) -> bool:
    """Whether a model's heads allow a layout."""
    try:
        check_layout(topology, parse_model_config(CONFIGS[name], where=name).heads)
    except LayoutError:
        return False
    return True


def write_models(names: Iterable[str], where: pytest.TempPathFactory) -> dict[str, Path]:
    """Directories of models with random weights, by name."""
    found = {name: where.mktemp(name) for name in names}
    for name, path in found.items():
        write_checkpoint(path, CONFIGS[name], seed=SEED)
    return found


def random_prompts(lengths: Iterable[int]) -> list[list[int]]:
    """Token ids, the same whenever the lengths are."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(203, (n,), generator=generator).tolist() for n in lengths]


def run(model: Path, lengths: Iterable[int], case: ForwardCase = ONE_RANK) -> Forward:
    """A model's logits of random prompts, on one rank if no case says otherwise."""
    return forward(resolve(str(model)), random_prompts(lengths), case)


def assert_same(got: Sequence[Tensor], wanted: Sequence[Tensor]) -> None:
    """Logits of each sequence, within what float32 rounds."""
    for mine, theirs in zip(got, wanted, strict=True):
        assert_within(mine.log_softmax(-1), theirs.log_softmax(-1), "logprobs", torch.float32)
