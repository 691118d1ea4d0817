"""The merge against known answers, and against attention that was never cut."""

import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvspan.attention.merge import Merged, merge_shards, natural_lse

VECTORS = json.loads((Path(__file__).parents[2] / "vectors" / "lse_merge.json").read_text())["cases"]


def tensor(nested: object, dtype: torch.dtype) -> torch.Tensor:
    def numbers(x: object) -> object:
        if isinstance(x, list):
            return [numbers(y) for y in x]
        return {None: math.nan, "inf": math.inf, "-inf": -math.inf}.get(x, x)  # type: ignore[call-overload]

    return torch.tensor(numbers(nested), dtype=dtype)


@pytest.mark.parametrize("case", VECTORS, ids=lambda c: f"{c['kind']}-base-{c['lse_base']}")
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-6), (torch.float32, 1e-5)])
def test_known_answers(case: dict, dtype: torch.dtype, bound: float) -> None:
    base = {"e": math.e, "2": 2.0}[case["lse_base"]]
    lses = tensor(case["lses"], dtype)
    out, lse = merge_shards(tensor(case["outputs"], dtype), natural_lse(lses, base=base))
    torch.testing.assert_close(out, tensor(case["merged"], dtype), atol=bound, rtol=0)
    wanted = natural_lse(tensor(case["merged_lse"], dtype), base=base)
    torch.testing.assert_close(lse, wanted, atol=bound, rtol=0)


def test_a_mixed_up_base_does_not_pass_for_the_right_one() -> None:
    case = next(c for c in VECTORS if c["lse_base"] == "2")
    out, _ = merge_shards(tensor(case["outputs"], torch.float64), tensor(case["lses"], torch.float64))
    assert (out - tensor(case["merged"], torch.float64)).abs().max() > 1e-3


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nothing_leaks_from_an_empty_shard(bad: float) -> None:
    x = torch.tensor([[[[0.1, -7.0]]], [[[math.nan, math.inf]]]])  # [W=2, R=1, H=1, D=2]
    out, lse = merge_shards(x, torch.tensor([[[1.0]], [[bad]]]))
    assert torch.equal(out, x[0])
    assert lse.item() == 1.0


def test_no_shard_saw_a_key() -> None:
    out, lse = merge_shards(torch.full((3, 2, 1, 4), math.nan), torch.full((3, 2, 1), -math.inf))
    assert torch.equal(out, torch.zeros(2, 1, 4))
    assert torch.equal(lse, torch.full((2, 1), -math.inf))


@settings(max_examples=60, deadline=None)
@given(
    owners=st.lists(st.integers(0, 6), min_size=1, max_size=40),
    spread=st.sampled_from([0.1, 1.0, 30.0]),
    seed=st.integers(0, 10_000),
)
def test_any_partition_of_the_keys_gives_the_same_attention(
    owners: list[int], spread: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores = spread * torch.randn(2, 3, len(owners), dtype=torch.float64, generator=generator)
    values = torch.randn(len(owners), 3, 5, dtype=torch.float64, generator=generator)
    place = torch.tensor(owners)

    def attend(keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        some = scores[..., keys]
        return torch.einsum("rhk,khd->rhd", some.softmax(-1), values[keys]), some.logsumexp(-1)

    shards = [attend(place == rank) for rank in range(7)]
    out, lse = merge_shards(torch.stack([o for o, _ in shards]), torch.stack([m for _, m in shards]))
    wanted, wanted_lse = attend(place >= 0)
    torch.testing.assert_close(out, wanted, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(lse, wanted_lse, atol=1e-12, rtol=1e-12)


def test_one_part_is_taken_as_it_is_and_others_are_merged_with_it() -> None:
    out, lse = torch.randn(2, 5, 2, 4), torch.randn(2, 5, 2)
    merged = Merged(5, 2, 4, device=torch.device("cpu"))
    assert not merged.out.any()
    assert torch.equal(merged.lse, torch.full((5, 2), -torch.inf))
    merged.add(slice(None), out[0], lse[0])
    assert torch.equal(merged.out, out[0])
    whole, total = merge_shards(out, lse)
    merged.add(slice(0, 5), out[1].clone(), lse[1])
    torch.testing.assert_close(merged.out, whole)
    torch.testing.assert_close(merged.lse, total)


@pytest.mark.parametrize("rows", [slice(1, 4), torch.tensor([4, 3, 2, 1, 0])])
def test_a_first_part_of_some_rows_or_in_another_order_is_put_where_it_belongs(
    rows: slice | torch.Tensor,
) -> None:
    places = torch.arange(5)[rows]
    out, lse = torch.randn(len(places), 2, 4), torch.randn(len(places), 2)
    merged = Merged(5, 2, 4, device=torch.device("cpu"))
    merged.add(rows, out, lse)
    torch.testing.assert_close(merged.out[places], out)
    assert merged.out.count_nonzero() == out.numel()
    assert merged.lse.isfinite().sum() == lse.numel()
