"""bf16: a layout is little farther from float32 than one rank of bf16 is, on the same tokens."""

from pathlib import Path

import pytest
import torch

from kvspan.check.compare import Position, compare_narrow
from kvspan.loading.resolve import resolve
from kvspan.testing.checkpoints import write_checkpoint
from kvspan.testing.forward import ForwardCase, forward
from kvspan.testing.tiny import TINY
from kvspan.topology import Topology
from tests.conftest import SEED

MODEL = "llama-gqa-9x3"
LENGTHS = (5, 1, 300, 500, 33, 411)
CASES = [
    ForwardCase(
        topology=Topology(tp_size=tp, dcp_size=dcp),
        interleave=interleave,
        exchange=exchange,
        replicate_q=replicate_q,
        chunk=chunk,
        dtype=torch.bfloat16,
    )
    for tp, dcp, interleave, exchange, replicate_q, chunk in [
        (2, 2, 8, "a2a", True, 10_000),
        (3, 1, 8, "a2a", False, 10_000),
        (3, 3, 4, "ag_rs", True, 17),
        (4, 4, 1, "a2a", False, 10_000),
        (5, 5, 8, "ag_rs", False, 10_000),
        (6, 6, 4, "a2a", True, 10_000),
        (8, 8, 8, "a2a", True, 16),
        (9, 3, 8, "ag_rs", True, 10_000),
    ]
]
HOMES = [
    ForwardCase(
        topology=Topology(tp_size=size, dcp_size=size),
        replicate_q=True,
        ranks_are_homes=True,
        random_pools=True,
        chunk=chunk,
        dtype=torch.bfloat16,
    )
    for size, chunk in [(3, 10_000), (3, 67), (9, 10_000)]  # prompts by heads, weights in panels
]

Runs = list[list[Position]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    write_checkpoint(directory, TINY[MODEL], seed=SEED, dtype=torch.bfloat16)
    return directory


def sequences() -> list[list[int]]:
    generator = torch.Generator().manual_seed(4)
    return [torch.randint(203, (n,), generator=generator).tolist() for n in LENGTHS]


def positions(model: Path, case: ForwardCase) -> Runs:
    """What a run says of each token: of the next one that is there, and its top two."""
    runs = []
    logits_of = forward(resolve(str(model)), sequences(), case).logits
    for tokens, logits in zip(sequences(), logits_of, strict=True):
        logprobs = logits.log_softmax(-1)[:-1]
        values, best = logprobs.topk(2)
        actual = logprobs.gather(-1, torch.tensor(tokens[1:], dtype=torch.int64)[:, None])[:, 0]
        gaps = values[:, 0] - values[:, 1]
        rows = zip(actual.tolist(), best[:, 0].tolist(), gaps.tolist(), strict=True)
        runs.append([Position(*row) for row in rows])
    return runs


@pytest.fixture(scope="module")
def references(model: Path) -> tuple[Runs, Runs]:
    """float32 and bf16 on one rank, of the same weights."""
    return positions(model, ForwardCase()), positions(model, ForwardCase(dtype=torch.bfloat16))


@pytest.mark.parametrize("case", [*CASES, *HOMES], ids=str)
def test_a_layout_is_as_near_as_one_rank(
    case: ForwardCase, model: Path, references: tuple[Runs, Runs]
) -> None:
    exact, one_rank = references
    compared = compare_narrow(str(case), exact, one_rank, positions(model, case))
    assert compared.one_rank.median > 0
    assert compared.holds, compared
