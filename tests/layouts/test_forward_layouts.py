"""Every layout gives one rank's logits, and every rank makes as many collective calls as its neighbours.

The full matrix, with one strategy of prefill each in turn, is slow; the everyday run takes combinations
in which every pair of values occurs.
"""

import itertools
from pathlib import Path

import pytest
import torch

from kvspan.cost.prefill import FEWEST_BYTES
from kvspan.testing.forward import ForwardCase
from kvspan.topology import Topology
from tests.conftest import SEED
from tests.layouts.forwards import assert_same, is_legal, run, write_models
from tests.layouts.pairwise import pairwise

# (T, W) with a model whose heads allow it; "decoupled" and "copies" both occur.
LAYOUTS = [
    ((1, 1), "qwen3"),
    ((2, 1), "llama-gqa"),
    ((2, 2), "llama-gqa-9x3"),
    ((3, 3), "qwen2-mqa-tied"),
    ((4, 2), "llama-gqa"),
    ((4, 4), "llama-gqa-9x3"),
    ((5, 5), "llama-mha-5-tied"),
    ((6, 6), "qwen2"),
    ((8, 8), "llama-biases"),
    ((9, 3), "llama-gqa-9x3"),
    ((7, 7), "llama3-rope"),
    ((6, 3), "llama-mqa"),
    ((1, 1), "deepseek-v3"),
    ((3, 1), "deepseek-v2-groups"),  # each rank has a copy of the latents
    ((2, 2), "deepseek-v2-lite"),
    ((4, 2), "deepseek-v3"),
    ((5, 5), "deepseek-v2-groups"),  # slices begin inside heads
    ((7, 7), "deepseek-v2-lite"),
    ((8, 8), "deepseek-v3"),
    ((6, 2), "deepseek-v3-plain-rope"),
    ((3, 3), "qwen2-moe"),
    ((8, 2), "qwen3-moe"),
    ((4, 4), "kimi"),
]
INTERLEAVES = [1, 4, 8]
EXCHANGES = ["a2a", "ag_rs"]
QUERIES = [False, True]
EXPERTS = [False, True]  # cut, or whole: the same thing to a dense model
CHUNKS = [10_000, 16, 17, 49]  # latents are expanded, or gathered, for 49 rows and more
STRATEGIES = [FEWEST_BYTES, "allgather_q", "allgather_kv"]
# 5 tokens leave shards empty on 8 ranks; 1 leaves all but one empty.
LENGTHS = (5, 1, 66, 118, 33)

Combination = tuple[tuple[tuple[int, int], str], int, str, bool, bool, int, str]
AXES = (LAYOUTS, INTERLEAVES, EXCHANGES, QUERIES, EXPERTS, CHUNKS, STRATEGIES)
EVERYDAY = pairwise(AXES, seed=SEED)
STRATEGY_IN_TURN = zip(itertools.product(*AXES[:-1]), itertools.cycle(STRATEGIES), strict=False)
SLOW = {(*others, strategy) for others, strategy in STRATEGY_IN_TURN} - set(EVERYDAY)
FULL = [*EVERYDAY, *(pytest.param(c, marks=pytest.mark.slow) for c in sorted(SLOW, key=str))]


def case_of(combination: Combination) -> ForwardCase:
    ((tp, dcp), _), interleave, exchange, replicate_q, expert_parallel, chunk, strategy = combination
    return ForwardCase(
        topology=Topology(tp_size=tp, dcp_size=dcp),
        interleave=interleave,
        exchange=exchange,
        replicate_q=replicate_q,
        expert_parallel=expert_parallel,
        chunk=chunk,
        prefill_strategy=strategy,
    )


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_models({name for _, name in LAYOUTS}, tmp_path_factory)


@pytest.fixture(scope="module")
def one_rank(checkpoints: dict[str, Path]) -> dict[str, list[torch.Tensor]]:
    return {name: run(path, LENGTHS).logits for name, path in checkpoints.items()}


@pytest.mark.parametrize("combination", FULL, ids=lambda c: f"{c[0][1]}-{case_of(c)}")
def test_a_layout_equals_one_rank(
    combination: Combination,
    checkpoints: dict[str, Path],
    one_rank: dict[str, list[torch.Tensor]],
) -> None:
    name = combination[0][1]
    result = run(checkpoints[name], LENGTHS, case_of(combination))
    for got, wanted in zip(result.logits, one_rank[name], strict=True):
        assert torch.equal(got.argmax(-1), wanted.argmax(-1))
    assert_same(result.logits, one_rank[name])
    ops = [[call.op for call in calls] for calls in result.calls]
    assert all(of_rank == ops[0] for of_rank in ops)


FAMILIES = ("deepseek-v2-lite", "deepseek-v3", "kimi", "qwen2-moe", "qwen3-moe")
EVERY_LAYOUT = [
    pytest.param(name, topology, id=f"{name}-T{topology.tp_size}-W{topology.dcp_size}")
    for name in FAMILIES
    for topology in (Topology(tp_size=t, dcp_size=w) for t in range(1, 9) for w in range(1, t + 1))
    if is_legal(name, topology)
]


@pytest.mark.slow
@pytest.mark.parametrize("interleave", [1, 8])
@pytest.mark.parametrize(("name", "topology"), EVERY_LAYOUT)
def test_every_legal_layout_of_a_family_equals_one_rank(
    name: str,
    topology: Topology,
    interleave: int,
    checkpoints: dict[str, Path],
    one_rank: dict[str, list[torch.Tensor]],
) -> None:
    case = ForwardCase(topology=topology, interleave=interleave, chunk=17)
    assert_same(run(checkpoints[name], LENGTHS, case).logits, one_rank[name])


def test_the_everyday_run_covers_every_pair() -> None:
    for a, b in itertools.combinations(range(len(AXES)), 2):
        met = {(str(c[a]), str(c[b])) for c in EVERYDAY}
        assert len(met) == len(AXES[a]) * len(AXES[b])
    assert len(EVERYDAY) < len(FULL) / 4
