"""Latents that are expanded or gathered a workspace at a time, at sizes that are no multiples."""

from pathlib import Path

import pytest
import torch

from kvspan.cost.prefill import FEWEST_BYTES
from kvspan.testing.checkpoints import write_checkpoint
from kvspan.testing.forward import Forward, ForwardCase
from kvspan.testing.tiny import TINY, tiny_deepseek_v3
from kvspan.topology import Topology
from tests.conftest import SEED
from tests.layouts.forwards import assert_same, run

WHOLE = 10_000
STRATEGIES = [FEWEST_BYTES, "allgather_q", "allgather_kv"]
TWO_RANKS = Topology(tp_size=2, dcp_size=2)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    write_checkpoint(directory, tiny_deepseek_v3(num_hidden_layers=2), seed=SEED)
    return directory


@pytest.fixture(scope="module")
def whole_heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose heads two ranks can share out."""
    directory = tmp_path_factory.mktemp("whole-heads")
    sizes = {"qk_nope_head_dim": 16, "v_head_dim": 16}
    write_checkpoint(directory, tiny_deepseek_v3(num_hidden_layers=2, **sizes), seed=SEED)
    return directory


def ops_by_rank(result: Forward) -> list[list[str]]:
    return [[call.op for call in calls] for calls in result.calls]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("workspace", [64, 128, WHOLE])
def test_contexts_that_are_multiples_of_nothing(model: Path, workspace: int, strategy: str) -> None:
    lengths = (3000, 200, 200)
    wanted = run(model, lengths, ForwardCase(block_size=64, interleave=64, workspace_tokens=WHOLE))
    case = ForwardCase(
        topology=TWO_RANKS,
        block_size=64,
        interleave=64,
        chunk=700,
        workspace_tokens=workspace,
        prefill_strategy=strategy,
    )
    assert_same(run(model, lengths, case).logits, wanted.logits)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("chunk", [64, 65, 3 * 64 + 5])
def test_three_chunks_and_five_tokens(model: Path, chunk: int, strategy: str) -> None:
    """64 rows and more are expanded or gathered, the last 5 are absorbed; both see all of the rest."""
    lengths = (3 * 64 + 5, 64, 1)
    wanted = run(model, lengths)
    for interleave in (1, 8):
        case = ForwardCase(
            topology=TWO_RANKS, chunk=chunk, interleave=interleave, prefill_strategy=strategy
        )
        assert_same(run(model, lengths, case).logits, wanted.logits)


@pytest.mark.parametrize("interleave", [1, 8])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", ["llama-gqa", "llama-gqa-9x3", "qwen3"])
def test_keys_and_values_are_gathered_like_latents(
    name: str, strategy: str, interleave: int, tmp_path: Path
) -> None:
    write_checkpoint(tmp_path, TINY[name], seed=SEED)
    lengths = (3 * 64 + 5, 64, 1)
    wanted = run(tmp_path, lengths)
    for topology in (TWO_RANKS, Topology(tp_size=3, dcp_size=3), Topology(tp_size=4, dcp_size=2)):
        if TINY[name]["num_attention_heads"] % topology.attention_tp_size:
            continue
        case = ForwardCase(topology=topology, chunk=64, interleave=interleave, prefill_strategy=strategy)
        assert_same(run(tmp_path, lengths, case).logits, wanted.logits)


@pytest.mark.parametrize(
    ("lengths", "replicate_q", "exchanges"),
    [((40,), True, 1), ((100,), True, 1), ((100, 7), True, 2), ((100, 7), False, 2)],
)
def test_collectives_of_a_layer_when_queries_move(
    model: Path, lengths: tuple[int, ...], replicate_q: bool, exchanges: int
) -> None:
    """One exchange for each way that has rows; replicated queries need no collective.

    The model's heads are cut between the ranks, so that fresh prompts are left to queries too.
    """
    case = ForwardCase(topology=TWO_RANKS, replicate_q=replicate_q)
    for ops in ops_by_rank(run(model, lengths, case)):
        assert ops.count("all_to_all") == 2 * exchanges
        assert ops.count("all_reduce") == 1 + 2 * 2  # embedding; attention and feed-forward of 2 layers
        assert ops.count("all_gather") == 1 + 2 * (not replicate_q)  # logits; queries


@pytest.mark.parametrize("lengths", [(1,), (100,), (100, 7, 3)])
@pytest.mark.parametrize("replicate_q", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_fresh_prompt_exchanges_nothing(
    whole_heads: Path, lengths: tuple[int, ...], replicate_q: bool, strategy: str
) -> None:
    """Neither queries nor keys nor results: embedding, sums and logits are all that is said."""
    case = ForwardCase(topology=TWO_RANKS, replicate_q=replicate_q, prefill_strategy=strategy)
    result = run(whole_heads, lengths, case)
    for ops in ops_by_rank(result):
        assert sorted(ops) == ["all_gather"] + ["all_reduce"] * 5
    assert_same(result.logits, run(whole_heads, lengths).logits)


@pytest.mark.parametrize("interleave", [1, 8])
@pytest.mark.parametrize("workspace", [16, 40, 64])
def test_a_workspace_is_never_exceeded(whole_heads: Path, workspace: int, interleave: int) -> None:
    """Every rank gives its share of it at the most, in equally many collectives of fitting sizes."""
    lengths, chunk = (3 * 64 + 5, 130, 7), 64
    case = ForwardCase(
        topology=TWO_RANKS,
        interleave=interleave,
        chunk=chunk,
        replicate_q=True,
        workspace_tokens=workspace,
        prefill_strategy="allgather_kv",
    )
    result = run(whole_heads, lengths, case)
    width = 24 + 8  # of a latent and its rotated part
    latents = [
        [call.elements // width for call in calls if call.op == "all_gather"]
        for calls in result.dcp_calls
    ]
    assert len(latents[0]) == len(latents[1])
    assert max(map(max, latents)) <= workspace // 2 // 2, "two parts at a time, of two ranks"
    # Two layers; contexts of sequences with 64 rows: 64 + 64, then 128; the last rows ask latents.
    assert sum(map(sum, latents)) == 2 * (64 + 64 + 128)
    assert_same(result.logits, run(whole_heads, lengths).logits)


def test_cached_context_is_gathered_where_that_is_less(whole_heads: Path) -> None:
    """A row is worth about 8 cached tokens here, so 64 rows gather 64 and not 1,000."""
    case = ForwardCase(topology=TWO_RANKS, chunk=64)
    near, far = [ops_by_rank(run(whole_heads, (n,), case))[0].count("all_to_all") for n in (128, 1064)]
    assert near == 0
    assert far > 0


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("kv_dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_rounded_latents_are_the_same_wherever_they_come_from(
    whole_heads: Path, kv_dtype: torch.dtype, strategy: str
) -> None:
    """The step's own tokens are seen as the cache will give them: chunks and strategies do not show."""
    lengths = (150, 70)
    wanted = run(whole_heads, lengths, ForwardCase(kv_dtype=kv_dtype))
    case = ForwardCase(
        topology=TWO_RANKS, chunk=60, interleave=1, kv_dtype=kv_dtype, prefill_strategy=strategy
    )
    assert_same(run(whole_heads, lengths, case).logits, wanted.logits)
