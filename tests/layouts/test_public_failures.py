"""Lengths and chunks at which engines of this kind have gone wrong in public, each literally."""

from pathlib import Path

import pytest
import torch

from kvspan.loading.resolve import resolve
from kvspan.testing.checkpoints import write_checkpoint
from kvspan.testing.forward import ForwardCase, forward
from kvspan.testing.tiny import KIMI, TINY
from kvspan.testing.tolerance import assert_within
from kvspan.topology import Topology
from tests.conftest import SEED
from tests.layouts.engines import engine, generate
from tests.layouts.test_engine_layouts import GREEDY, assert_same

MODELS = {"llama": TINY["llama-gqa"], "kimi": KIMI}


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp(request.param)
    write_checkpoint(directory, MODELS[request.param], seed=SEED)
    return directory


def tokens(length: int) -> list[int]:
    generator = torch.Generator().manual_seed(length)
    return torch.randint(203, (length,), generator=generator).tolist()


@pytest.mark.parametrize("strategy", ["allgather_q", "allgather_kv"])
def test_fine_at_118_and_garbage_from_205(model: Path, strategy: str) -> None:
    prompts = [tokens(n) for n in (66, 118, 205, 408, 811, 1651)]
    wanted = forward(resolve(str(model)), prompts, ForwardCase(block_size=16, interleave=16))
    case = ForwardCase(
        topology=Topology(tp_size=4, dcp_size=4),
        block_size=16,
        interleave=16,
        chunk=512,
        workspace_tokens=256,
        prefill_strategy=strategy,
    )
    got = forward(resolve(str(model)), prompts, case)
    for mine, theirs in zip(got.logits, wanted.logits, strict=True):
        assert_within(mine.log_softmax(-1), theirs.log_softmax(-1), "logprobs", torch.float32)


def test_a_40_token_prompt_in_chunks_of_32(model: Path) -> None:
    with engine(model) as llm:
        wanted = generate(llm, [tokens(40)], GREEDY)
    layout = {"tensor_parallel_size": 2, "decode_context_parallel_size": 2}
    for options in ({}, layout):
        with engine(model, max_num_batched_tokens=32, max_num_seqs=4, **options) as llm:
            assert_same(generate(llm, [tokens(40)], GREEDY), wanted)


@pytest.mark.parametrize("chunk", [pytest.param(16, marks=pytest.mark.slow), 17, 1500])
def test_a_1500_token_prompt_alone_and_with_others(model: Path, chunk: int) -> None:
    """Neither the chunks it is cut in nor what runs beside it shows in its tokens."""
    options = {"max_model_len": 1600, "enable_prefix_caching": False}
    long, others = tokens(1500), [tokens(n) for n in (3, 64, 200)]
    with engine(model, **options) as llm:
        (wanted,) = generate(llm, [long], GREEDY)
    layout = {"tensor_parallel_size": 2, "decode_context_parallel_size": 2}
    with engine(model, **options, **layout, max_num_batched_tokens=chunk, max_num_seqs=8) as llm:
        assert_same(generate(llm, [long], GREEDY), [wanted])
        assert_same(generate(llm, [others[0], long, *others[1:]], GREEDY)[1:2], [wanted])
