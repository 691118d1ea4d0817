"""Routing against a twin that takes one row at a time; experts against a sum that is written out."""

import math
from itertools import product

import msgspec
import pytest
import torch
from torch.nn import functional as F

from kvspan.comm.local import LocalWorld, solo
from kvspan.config.moe import MoeConfig
from kvspan.layers.experts import Experts
from kvspan.layers.linear import Storage
from kvspan.layers.moe import MoE
from kvspan.layers.routing import Router, Routing
from kvspan.layers.team import Team
from kvspan.testing.ranks import CountingGroup, run_ranks
from kvspan.topology import Span

HIDDEN = 10
EXACT = Storage(torch.float32, torch.device("cpu"))
ALONE = Team(solo())
ROUTINGS = {
    "softmax": MoeConfig(layers=(0,), num_experts=8, experts_per_token=3, intermediate_size=20),
    "softmax-normalised": MoeConfig(
        layers=(0,), num_experts=8, experts_per_token=3, intermediate_size=20, normalise=True
    ),
    "best-group-by-one": MoeConfig(
        layers=(0,),
        num_experts=8,
        experts_per_token=3,
        intermediate_size=20,
        num_groups=4,
        groups_per_token=2,
        scaling_factor=16.0,
    ),
    "sigmoid-bias-groups-by-two": MoeConfig(
        layers=(0,),
        num_experts=12,
        experts_per_token=4,
        intermediate_size=20,
        scoring="sigmoid",
        correction_bias=True,
        num_groups=3,
        groups_per_token=2,
        group_scores=2,
        normalise=True,
        scaling_factor=2.5,
    ),
}


def drawn(module: torch.nn.Module, seed: int = 0) -> torch.nn.Module:
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return module


def naive_routing(moe: MoeConfig, logits: list[float], bias: list[float]) -> dict[int, float]:
    """Expert -> weight, of one row."""
    total = math.fsum(math.exp(x) for x in logits)
    softmax = [math.exp(x) / total for x in logits]
    scores = softmax if moe.scoring == "softmax" else [1 / (1 + math.exp(-x)) for x in logits]
    ranked = [s + b for s, b in zip(scores, bias, strict=True)]
    size = moe.num_experts // moe.num_groups
    groups = [list(range(g * size, (g + 1) * size)) for g in range(moe.num_groups)]
    groups.sort(key=lambda g: -sum(sorted((ranked[e] for e in g), reverse=True)[: moe.group_scores]))
    reachable = [e for g in groups[: moe.groups_per_token] for e in g]
    chosen = sorted(reachable, key=lambda e: -ranked[e])[: moe.experts_per_token]
    divisor = sum(scores[e] for e in chosen) if moe.normalise else 1.0
    return {e: scores[e] / divisor * moe.scaling_factor for e in chosen}


@pytest.mark.parametrize("name", ROUTINGS)
def test_routing_equals_its_twin(name: str) -> None:
    moe = ROUTINGS[name]
    router = drawn(Router(moe, HIDDEN, storage=EXACT))
    x = torch.randn(40, HIDDEN)
    routing = router(x)
    bias = [0.0] * moe.num_experts if router.bias is None else router.bias.tolist()
    for row, logits in enumerate(F.linear(x, router.weight).tolist()):
        got = dict(zip(routing.experts[row].tolist(), routing.weights[row].tolist(), strict=True))
        assert got == pytest.approx(naive_routing(moe, logits, bias), rel=1e-4)


def test_experts_add_up_and_unasked_ones_are_not_touched() -> None:
    moe = ROUTINGS["softmax"]
    layer = Experts(moe, HIDDEN, experts=Span(0, 8), inner=Span(0, 20), storage=EXACT)
    drawn(layer)
    for unasked in (1, 6, 7):  # NaN would show
        layer.gate_up[unasked], layer.down[unasked] = torch.nan, torch.nan
    experts = torch.tensor([[0, 2, 3], [4, 3, 5], [3, 0, 4]])
    weights, x = torch.rand(3, 3), torch.randn(3, HIDDEN)
    got = layer(x, Routing(experts, weights), None, ALONE)
    for row, place in product(range(3), range(3)):
        e = int(experts[row, place])
        gate, up = layer.gate_up[e, :20] @ x[row], layer.gate_up[e, 20:] @ x[row]
        got[row] -= weights[row, place] * (layer.down[e] @ (F.silu(gate) * up))
    torch.testing.assert_close(got, torch.zeros_like(got), atol=1e-4, rtol=0)


def test_no_rows_is_an_ordinary_input() -> None:
    moe = ROUTINGS["sigmoid-bias-groups-by-two"]
    layer = drawn(MoE(moe, HIDDEN, expert_parallel=False, group=solo(), storage=EXACT))
    assert layer(torch.zeros(0, HIDDEN), ALONE).shape == (0, HIDDEN)


@pytest.mark.parametrize("expert_parallel", [False, True])
@pytest.mark.parametrize("size", [1, 2, 5, 13])
def test_a_layer_makes_one_collective_and_may_keep_nothing(size: int, expert_parallel: bool) -> None:
    """13 ranks share 12 experts of 20: 3 units of 8, so either way some ranks keep none of them."""
    moe = ROUTINGS["sigmoid-bias-groups-by-two"]
    x = torch.randn(6, HIDDEN, generator=torch.Generator().manual_seed(1))

    def body(world: LocalWorld) -> tuple[list[str], int]:
        group = CountingGroup(world.group([range(world.size)]))
        layer = MoE(moe, HIDDEN, expert_parallel=expert_parallel, group=group, storage=EXACT)
        with torch.no_grad():
            drawn(layer)(x, ALONE)
        return [call.op for call in group.calls], layer.experts.down.numel()

    results = run_ranks(size, body)
    assert all(calls == ["all_reduce"] for calls, _ in results)
    assert sum(kept for _, kept in results) == 12 * 20 * HIDDEN


@pytest.mark.parametrize("expert_parallel", [False, True])
@pytest.mark.parametrize("sizes", [(2, 2), (3, 0, 1), (0, 5), (1, 1, 1, 1, 1)], ids=str)
def test_a_team_gives_each_of_its_ranks_what_it_would_have_alone(
    sizes: tuple[int, ...], expert_parallel: bool
) -> None:
    """An inner dim of 80 is 3 pieces of up to 32: with 5 ranks some read no weights at all."""
    moe = msgspec.structs.replace(ROUTINGS["softmax"], intermediate_size=80, shared_intermediate_size=80)
    x = torch.randn(sum(sizes), HIDDEN, generator=torch.Generator().manual_seed(1))
    alone = drawn(MoE(moe, HIDDEN, expert_parallel=expert_parallel, group=solo(), storage=EXACT))
    wanted = alone(x, ALONE)

    def body(world: LocalWorld) -> torch.Tensor:
        team = Team(world.group([range(world.size)]), sizes)
        layer = drawn(MoE(moe, HIDDEN, expert_parallel=expert_parallel, group=solo(), storage=EXACT))
        return layer(x.split(list(sizes))[world.rank], team)

    torch.testing.assert_close(torch.cat(run_ranks(len(sizes), body)), wanted, atol=1e-5, rtol=1e-5)
