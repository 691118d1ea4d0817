"""Latents that are expanded a workspace at a time, at sizes that are multiples of nothing."""

from pathlib import Path

import pytest
import torch

from kvspan.loading.resolve import resolve
from kvspan.testing.checkpoints import write_checkpoint
from kvspan.testing.forward import Forward, ForwardCase, forward
from kvspan.testing.tiny import tiny_deepseek_v3
from kvspan.testing.tolerance import assert_within
from kvspan.topology import Topology
from tests.conftest import SEED

WHOLE = 10_000
TWO_RANKS = Topology(tp_size=2, dcp_size=2)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    write_checkpoint(directory, tiny_deepseek_v3(num_hidden_layers=2), seed=SEED)
    return directory


def run(model: Path, lengths: tuple[int, ...], case: ForwardCase) -> Forward:
    generator = torch.Generator().manual_seed(3)
    tokens = [torch.randint(203, (n,), generator=generator).tolist() for n in lengths]
    return forward(resolve(str(model)), tokens, case)


def assert_same(got: Forward, wanted: Forward) -> None:
    for mine, theirs in zip(got.logits, wanted.logits, strict=True):
        assert_within(mine.log_softmax(-1), theirs.log_softmax(-1), "logprobs", torch.float32)


@pytest.mark.parametrize("workspace", [64, 128, WHOLE])
def test_contexts_that_are_multiples_of_nothing(model: Path, workspace: int) -> None:
    lengths = (3000, 200, 200)
    wanted = run(model, lengths, ForwardCase(block_size=64, interleave=64, workspace_tokens=WHOLE))
    case = ForwardCase(
        topology=TWO_RANKS, block_size=64, interleave=64, chunk=700, workspace_tokens=workspace
    )
    assert_same(run(model, lengths, case), wanted)


@pytest.mark.parametrize("chunk", [64, 65, 3 * 64 + 5])
def test_three_chunks_and_five_tokens(model: Path, chunk: int) -> None:
    """64 rows and more are expanded, the last 5 rows are absorbed; both see all of the rest."""
    lengths = (3 * 64 + 5, 64, 1)
    wanted = run(model, lengths, ForwardCase())
    for interleave in (1, 8):
        case = ForwardCase(topology=TWO_RANKS, chunk=chunk, interleave=interleave)
        assert_same(run(model, lengths, case), wanted)


@pytest.mark.parametrize(
    ("lengths", "replicate_q", "exchanges"),
    [((40,), True, 1), ((100,), True, 1), ((100, 7), True, 2), ((100, 7), False, 2)],
)
def test_collectives_of_a_layer(
    model: Path, lengths: tuple[int, ...], replicate_q: bool, exchanges: int
) -> None:
    """One exchange for each way that has rows; replicated queries need no collective."""
    case = ForwardCase(topology=TWO_RANKS, replicate_q=replicate_q)
    for calls in run(model, lengths, case).calls:
        ops = [call.op for call in calls]
        assert ops.count("all_to_all") == 2 * exchanges
        assert ops.count("all_reduce") == 1 + 2 * 2  # embedding; attention and feed-forward of 2 layers
        assert ops.count("all_gather") == 1 + 2 * (not replicate_q)  # logits; queries
