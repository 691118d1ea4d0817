"""The most probable token: as torch finds it, of whole rows and of rows that ranks share out."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvspan.layers import best as module
from kvspan.layers.best import best
from kvspan.layers.logits import Logits
from kvspan.native import NativePath
from kvspan.testing.ranks import run_ranks
from kvspan.topology import cuts

NUMBERS = st.sampled_from([0.0, -0.0, 1.5, -3.0, 1e-40, -1e-40, 3e38, math.inf, -math.inf, math.nan])


@settings(deadline=None)
@given(st.lists(NUMBERS, min_size=1, max_size=9), st.integers(0, 2200))
def test_it_is_the_largest_and_the_first_of_several_alike(row: list[float], before: int) -> None:
    logits = torch.tensor([[-math.inf] * before + row, row + [row[0]] * before])
    found = best(logits[:, : before + len(row)])
    assert torch.equal(found.values.nan_to_num(7.0), logits.amax(-1).nan_to_num(7.0))
    usable = ~found.values.isnan()
    assert torch.equal(found.tokens[usable], logits.argmax(-1)[usable])


@pytest.mark.parametrize("native", [True, False])
def test_a_row_of_nothing_has_a_largest_that_cannot_be_used(
    native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not native:
        monkeypatch.setattr(module, "native_path", lambda: NativePath(None, "for the test"))
    assert best(torch.empty(2, 0)).values.tolist() == [-math.inf] * 2


@pytest.mark.timeout(60)
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_ranks_find_together_what_one_finds(size: int) -> None:
    logits = torch.randn(40, 70, generator=torch.Generator().manual_seed(1)).round(decimals=1)
    logits[3], logits[4, 60], logits[5] = -math.inf, math.nan, 1.0
    parts = cuts(70, parts=size)
    wanted = best(logits)
    for found in run_ranks(
        size,
        lambda world: Logits(
            logits[:, parts[world.rank].start : parts[world.rank].stop],
            world.group([range(size)]),
            parts,
        ).best(),
    ):
        assert torch.equal(found.values.nan_to_num(7.0), wanted.values.nan_to_num(7.0))
        assert torch.equal(found.tokens[:4], wanted.tokens[:4])
        assert torch.equal(found.tokens[5:], wanted.tokens[5:])
