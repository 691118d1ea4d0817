"""Keys and values that PCP coordinates make of latents together are those that each would make."""

from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch

from kvspan import SamplingParams
from kvspan.testing.checkpoints import write_checkpoint
from kvspan.testing.forward import Forward, ForwardCase
from kvspan.testing.tiny import tiny_deepseek_v3
from kvspan.topology import Topology
from tests.conftest import SEED
from tests.layouts.engines import engine, generate
from tests.layouts.forwards import assert_same, run

LENGTHS = (1, 2, 5, 7, 8, 9, 33, 150)
SIZES = [
    Topology(tp_size=t, dcp_size=w, pcp_size=p)
    for p, t in product((2, 3, 4), (1, 2))
    for w in range(1, p * t + 1)
    if w == 1 or (w % p == 0 and t % (w // p) == 0)
]
EVERYDAY = {(2, 1, 1), (2, 1, 2), (2, 2, 4), (3, 2, 3)}
NEVER = 10_000
TWO = Topology(pcp_size=2, dcp_size=2)
TWO_COPIES = Topology(pcp_size=2)


def matrix() -> list[object]:
    return [
        pytest.param(
            t,
            marks=() if (t.pcp_size, t.tp_size, t.dcp_size) in EVERYDAY else pytest.mark.slow,
            id=f"P{t.pcp_size}-T{t.tp_size}-W{t.dcp_size}",
        )
        for t in SIZES
    ]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Heads that ranks can share out, so that fresh prompts are gathered without being asked to."""
    directory = tmp_path_factory.mktemp("model")
    sizes = {"qk_nope_head_dim": 16, "v_head_dim": 16}
    write_checkpoint(directory, tiny_deepseek_v3(num_hidden_layers=2, **sizes), seed=SEED)
    return directory


@pytest.fixture(scope="module")
def one_rank(model: Path) -> Forward:
    return run(model, LENGTHS)


def ops_of_pcp(result: Forward) -> list[list[str]]:
    """For each rank, what it did with other coordinates."""
    return [[call.op for call in by_group[2]] for by_group in result.group_calls]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("random_pools", [False, True])
@pytest.mark.parametrize("together_tokens", [1, 20])
@pytest.mark.parametrize(("chunk", "workspace_tokens"), [(10_000, 1024), (17, 48), (64, 48)])
@pytest.mark.parametrize("topology", matrix())
def test_what_is_made_together_equals_one_rank(
    topology: Topology,
    chunk: int,
    workspace_tokens: int,
    together_tokens: int,
    random_pools: bool,
    model: Path,
    one_rank: Forward,
) -> None:
    """Prompts of many lengths side by side, whole or in chunks whose context is gathered in parts."""
    case = ForwardCase(
        topology=topology,
        chunk=chunk,
        workspace_tokens=workspace_tokens,
        together_tokens=together_tokens,
        random_pools=random_pools,
        prefill_strategy="allgather_kv",
    )
    result = run(model, LENGTHS, case)
    assert_same(result.logits, one_rank.logits)
    assert_equal_calls(result, topology)


def assert_equal_calls(result: Forward, topology: Topology) -> None:
    partitions = (topology.tp_groups(), topology.dcp_groups(), topology.pcp_groups())
    for number, partition in enumerate(partitions):
        for group in partition:
            ops = [[call.op for call in result.group_calls[rank][number]] for rank in group]
            assert all(of_rank == ops[0] for of_rank in ops)


@pytest.mark.parametrize("topology", [TWO, TWO_COPIES], ids=["sharded", "copies"])
@pytest.mark.parametrize(("length", "gathers"), [(39, 0), (40, 1), (150, 3)])
def test_one_gather_more_for_each_part_that_is_large_enough(
    length: int, gathers: int, topology: Topology, model: Path
) -> None:
    """Parts of 48 tokens: 150 are three of them and 6 more, too few."""
    lengths = (length,)
    case = ForwardCase(topology=topology, workspace_tokens=48)
    alone = ops_of_pcp(run(model, lengths, case))
    together = ops_of_pcp(run(model, lengths, replace(case, together_tokens=40)))
    num_layers = 2
    for mine, before in zip(together, alone, strict=True):
        assert mine.count("all_gather") == before.count("all_gather") + num_layers * gathers


@pytest.mark.parametrize("topology", [TWO, TWO_COPIES], ids=["sharded", "copies"])
def test_a_coordinate_without_rows_makes_its_share(topology: Topology, model: Path) -> None:
    """A prompt that is not cut has all its rows at one coordinate; the others make keys for it."""
    lengths = (33,)
    case = ForwardCase(topology=topology, least_tokens_to_split=1000, workspace_tokens=1024)
    wanted = run(model, lengths)
    result = run(model, lengths, replace(case, together_tokens=1))
    assert_same(result.logits, wanted.logits)
    assert_equal_calls(result, topology)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("kv_dtype", [None, torch.int8])
def test_over_shared_memory(kv_dtype: torch.dtype | None, model: Path) -> None:
    """Where the gathers of latents and of what is made of them are one group's, one behind the other."""
    case = ForwardCase(
        topology=TWO, chunk=64, workspace_tokens=48, kv_dtype=kv_dtype, prefill_strategy="allgather_kv"
    )
    threads = run(model, LENGTHS, replace(case, together_tokens=NEVER))
    shared = run(model, LENGTHS, replace(case, together_tokens=1, shared_memory=True))
    assert_same(shared.logits, threads.logits)


@pytest.mark.parametrize("dcp", [1, 2])
def test_a_prompt_before_one_whose_prefix_is_there(dcp: int, model: Path) -> None:
    """In one step keys come to the rows of the first, and the few rows of the other ask for theirs."""
    fresh, known = [[(i + n) % 190 for i in range(90)] for n in (3, 40)]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)

    def tokens(**options: object) -> list[list[int]]:
        with engine(model, **options) as llm:
            generate(llm, [known], params)
            both = generate(llm, [fresh, [*known, 7]], params)
            assert both[1].num_cached_tokens >= 80
            return [list(generation.first.token_ids) for generation in both]

    layout = {"prefill_context_parallel_size": 2, "decode_context_parallel_size": dcp}
    assert tokens(**layout) == tokens()
