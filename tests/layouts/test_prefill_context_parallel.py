"""Rows spread over PCP coordinates give one rank's logits, with equal collective calls on every rank."""

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from kvspan.cost.rows import least_tokens_to_split
from kvspan.layers.experts import Experts
from kvspan.loading.resolve import resolve
from kvspan.testing.forward import Forward, ForwardCase, forward
from kvspan.topology import Span, Topology
from tests.layouts.forwards import assert_same, is_legal, run, write_models

MODELS = ("llama-gqa-9x3", "qwen3", "deepseek-v3", "deepseek-v2-lite", "qwen3-moe", "llama-mqa")
SIZES = [
    Topology(tp_size=t, dcp_size=w, pcp_size=p)
    for p, t in product((2, 3, 4), (1, 2))
    for w in range(1, p * t + 1)
    if w == 1 or w % p == 0
]
EVERYDAY = {(2, 1, 1), (2, 1, 2), (2, 2, 4), (3, 2, 3)}
LENGTHS = (1, 2, 5, 7, 8, 9, 33, 150)
LONG = (500, 2000, 3)


def matrix(models: Sequence[str] = MODELS) -> list[object]:
    return [
        pytest.param(
            name,
            topology,
            marks=()
            if (topology.pcp_size, topology.tp_size, topology.dcp_size) in EVERYDAY
            else pytest.mark.slow,
            id=f"{name}-P{topology.pcp_size}-T{topology.tp_size}-W{topology.dcp_size}",
        )
        for name in models
        for topology in SIZES
        if is_legal(name, topology)
    ]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_models(MODELS, tmp_path_factory)


@pytest.fixture(scope="module")
def one_rank(checkpoints: dict[str, Path]) -> dict[str, list[torch.Tensor]]:
    return {name: run(path, LENGTHS).logits for name, path in checkpoints.items()}


@pytest.fixture(scope="module")
def one_rank_long(checkpoints: dict[str, Path]) -> dict[str, list[torch.Tensor]]:
    case = ForwardCase(block_size=16, interleave=16, workspace_tokens=1024)
    return {name: run(checkpoints[name], LONG, case).logits for name in MODELS[:3]}


@pytest.mark.parametrize("random_pools", [False, True])
@pytest.mark.parametrize("strategy", ["allgather_q", "allgather_kv"])
@pytest.mark.parametrize(("chunk", "least_tokens"), [(10_000, 1), (17, 1), (17, 20)])
@pytest.mark.parametrize(("name", "topology"), matrix())
def test_rows_over_coordinates_equal_one_rank(
    name: str,
    topology: Topology,
    chunk: int,
    least_tokens: int,
    strategy: str,
    random_pools: bool,
    checkpoints: dict[str, Path],
    one_rank: dict[str, list[torch.Tensor]],
) -> None:
    case = ForwardCase(
        topology=topology,
        chunk=chunk,
        least_tokens_to_split=least_tokens,
        prefill_strategy=strategy,
        random_pools=random_pools,
    )
    result = run(checkpoints[name], LENGTHS, case)
    assert_same(result.logits, one_rank[name])
    assert_equal_calls(result, topology)


def assert_equal_calls(result: Forward, topology: Topology) -> None:
    """On every rank; a request at one coordinate concerns no other, so groups are seen one by one."""
    partitions = (topology.tp_groups(), topology.dcp_groups(), topology.pcp_groups())
    for number, partition in enumerate((*partitions, topology.column_groups())):
        for group in partition:
            ops = [
                [c.op for c in calls[number]]
                for r in group
                if len(calls := result.group_calls[r]) > number
            ]
            assert all(of_rank == ops[0] for of_rank in ops)


@pytest.mark.parametrize(
    ("chunk", "team_rows"), [(1, Span(1, 10_000)), (17, Span(1, 10_000)), (4, Span(2, 7))], ids=str
)
@pytest.mark.parametrize(("name", "topology"), matrix())
def test_coordinates_that_are_a_team_equal_one_rank(
    name: str,
    topology: Topology,
    chunk: int,
    team_rows: Span,
    checkpoints: dict[str, Path],
    one_rank: dict[str, list[torch.Tensor]],
) -> None:
    """In all steps or in some: where one token of each is computed with idle rows, else without."""
    case = ForwardCase(
        topology=topology, chunk=chunk, least_tokens_to_split=4, team_rows=team_rows, random_pools=True
    )
    short = LENGTHS[:-1]
    result = run(checkpoints[name], short, case)
    assert_same(result.logits, one_rank[name][: len(short)])
    assert_equal_calls(result, topology)
    assert any(call.op == "reduce_scatter" for calls in result.group_calls[0] for call in calls)


@pytest.mark.parametrize("name", ["qwen3-moe", "deepseek-v3"])
def test_idle_rows_of_a_team_are_zeros_to_experts(
    name: str, checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that none is read for them."""
    seen: list[list[bool]] = []
    multiply = Experts.forward

    def noted(layer: Experts, x: torch.Tensor, *others: Any) -> torch.Tensor:
        seen.append(x.any(1).tolist())
        return multiply(layer, x, *others)

    monkeypatch.setattr(Experts, "forward", noted)
    case = ForwardCase(topology=Topology(pcp_size=3, dcp_size=3), chunk=1, team_rows=Span(1, 9))
    run(checkpoints[name], (4,), case)
    assert seen
    assert all(sum(busy) == 1 and len(busy) == 3 for busy in seen)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("strategy", ["allgather_q", "allgather_kv"])
@pytest.mark.parametrize("chunk", [333, 1999])
@pytest.mark.parametrize(("name", "topology"), matrix(MODELS[:3]))
def test_long_prompts_equal_one_rank(
    name: str,
    topology: Topology,
    chunk: int,
    strategy: str,
    checkpoints: dict[str, Path],
    one_rank_long: dict[str, list[torch.Tensor]],
) -> None:
    """In chunks that divide nothing, beside a short prompt, with blocks of 16 on pools in turn."""
    case = ForwardCase(
        topology=topology,
        block_size=16,
        interleave=16,
        chunk=chunk,
        least_tokens_to_split=least_tokens_to_split(topology.pcp_size),
        prefill_strategy=strategy,
        workspace_tokens=128,
    )
    result = run(checkpoints[name], LONG, case)
    assert_same(result.logits, one_rank_long[name])
    assert_equal_calls(result, topology)


@pytest.mark.parametrize("name", ["llama-gqa-9x3", "deepseek-v3"])
def test_requests_at_home_concern_nobody_else(name: str, checkpoints: dict[str, Path]) -> None:
    """Sequences of one block each: no key and no query leaves its coordinate, only final states do."""
    case = ForwardCase(
        topology=Topology(tp_size=1, dcp_size=2, pcp_size=2), block_size=16, interleave=16
    )
    short = [list(range(5, 5 + n)) for n in (1, 7, 16, 3, 9)]
    result = forward(resolve(str(checkpoints[name])), short, case)
    assert all(calls == [] for calls in result.dcp_calls)
    pcp_calls = [by_group[2] for by_group in result.group_calls]
    assert [len(calls) for calls in pcp_calls] == [1, 1]
    alone = forward(resolve(str(checkpoints[name])), short, ForwardCase())
    assert_same(result.logits, alone.logits)
