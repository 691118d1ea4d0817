"""Native routing against torch's: the same experts and the same weights, ties among them."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvspan.config.moe import MoeConfig
from kvspan.layers.routing import native_routing, torch_routing
from kvspan.native import native_path

pytestmark = pytest.mark.skipif(native_path().isa is None, reason=native_path().why)


@st.composite
def routings(draw: st.DrawFn) -> MoeConfig:
    num_groups, of_group = draw(st.integers(1, 5)), draw(st.integers(1, 9))
    groups_per_token = draw(st.integers(1, num_groups))
    return MoeConfig(
        layers=(0,),
        num_experts=num_groups * of_group,
        experts_per_token=draw(st.integers(1, groups_per_token * of_group)),
        intermediate_size=8,
        scoring=draw(st.sampled_from(["softmax", "sigmoid"])),
        correction_bias=draw(st.booleans()),
        num_groups=num_groups,
        groups_per_token=groups_per_token,
        group_scores=draw(st.integers(1, 3)),
        normalise=draw(st.booleans()),
        scaling_factor=draw(st.sampled_from([1.0, 2.5, 16.0])),
    )


def assert_alike(moe: MoeConfig, logits: torch.Tensor, bias: torch.Tensor | None) -> None:
    native, wanted = native_routing(moe, logits, bias), torch_routing(moe, logits, bias)
    assert torch.equal(native.experts, wanted.experts)
    torch.testing.assert_close(native.weights, wanted.weights, rtol=2e-7, atol=0, equal_nan=True)


@settings(max_examples=300, deadline=None)
@given(moe=routings(), rows=st.integers(0, 20), values=st.integers(1, 12), seed=st.integers(0, 999))
def test_the_same_experts_also_of_equal_logits(
    moe: MoeConfig, rows: int, values: int, seed: int
) -> None:
    """Logits are few different numbers, so that most of them are ties."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(values, generator=generator)[
            torch.randint(values, shape, generator=generator)
        ]

    bias = drawn(moe.num_experts) / 4 if moe.correction_bias else None
    assert_alike(moe, drawn(rows, moe.num_experts), bias)


@pytest.mark.parametrize(
    "traits",
    [
        {},
        {"scoring": "sigmoid", "correction_bias": True, "group_scores": 2, "normalise": True},
        {"group_scores": 1},
    ],
    ids=["one-group", "as-deepseek-v3", "best-group-by-one"],
)
def test_the_same_experts_of_many_rows(traits: dict[str, Any]) -> None:
    groups = {"num_groups": 8, "groups_per_token": 4} if traits else {}
    sizes = {"num_experts": 256, "experts_per_token": 8, "intermediate_size": 8}
    moe = MoeConfig(layers=(0,), **sizes, **groups, **traits)
    logits = torch.randn(3000, 256, generator=torch.Generator().manual_seed(1)) * 3
    assert_alike(moe, logits, torch.linspace(-0.1, 0.1, 256) if moe.correction_bias else None)


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("strange", [torch.nan, torch.inf, -torch.inf])
def test_a_row_of_strange_logits_has_experts_and_leaves_others_alone(
    scoring: str, strange: float
) -> None:
    moe = MoeConfig(
        layers=(0,),
        num_experts=12,
        experts_per_token=4,
        intermediate_size=8,
        scoring=scoring,
        num_groups=3,
        groups_per_token=2,
        group_scores=2,
        normalise=True,
    )
    logits = torch.randn(3, 12, generator=torch.Generator().manual_seed(2))
    alone = native_routing(moe, logits[:1], None)
    for which in (slice(4, 6), slice(0, 12)):
        odd = logits.clone()
        odd[1, which] = strange
        assert_alike(moe, odd, None)
        assert torch.equal(native_routing(moe, odd, None).weights[:1], alone.weights)
