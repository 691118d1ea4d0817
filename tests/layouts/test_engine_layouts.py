"""Whole engines on thread ranks: any layout, chunk, cache state and trouble gives one rank's text.

Every engine recounts its blocks after each step.
"""

from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
import torch

from kvspan import SamplingParams
from kvspan.engine.engine import Generation
from kvspan.testing.checkpoints import write_checkpoint
from kvspan.testing.tiny import TINY
from tests.conftest import SEED
from tests.layouts.engines import engine, generate

MODEL = "llama-gqa-9x3"
OUTPUT_TOKENS = 12
GREEDY = SamplingParams(temperature=0, max_tokens=OUTPUT_TOKENS, ignore_eos=True, logprobs=2)
# A draw falls on another token if its number lies within float32's rounding (1e-7) of a border between
# two; that is chance, and of the 4,000 draws here seed 5 has one.
DRAWN = SamplingParams(
    temperature=0.9, top_p=0.9, seed=6, max_tokens=OUTPUT_TOKENS, ignore_eos=True, logprobs=2
)
GREEDY_LONG = msgspec.structs.replace(GREEDY, max_tokens=60)
DRAWN_LONG = msgspec.structs.replace(DRAWN, max_tokens=60)
# One token; fewer than ranks; block borders of 16 and their neighbours; several chunks.
LENGTHS = (1, 5, 16, 17, 33, 118, 205)

LAYOUTS = {
    "T2-W2": {"tensor_parallel_size": 2, "decode_context_parallel_size": 2},
    "T3-W1": {"tensor_parallel_size": 3, "decode_context_parallel_size": 1},
    "T3-W3-I4": {
        "tensor_parallel_size": 3,
        "decode_context_parallel_size": 3,
        "cp_kv_cache_interleave_size": 4,
        "dcp_comm_backend": "ag_rs",
    },
    "T4-W4": {"tensor_parallel_size": 4, "decode_context_parallel_size": 4},
    "T8-W8-I1": {
        "tensor_parallel_size": 8,
        "decode_context_parallel_size": 8,
        "cp_kv_cache_interleave_size": 1,
    },
    "T8-W8": {
        "tensor_parallel_size": 8,
        "decode_context_parallel_size": 8,
        "dcp_q_replicate": "off",
    },
    "P2-T1-W1": {"prefill_context_parallel_size": 2},
    "P2-T2-W4": {
        "prefill_context_parallel_size": 2,
        "tensor_parallel_size": 2,
        "decode_context_parallel_size": 4,
    },
    "P3-T1-W3-I4": {
        "prefill_context_parallel_size": 3,
        "decode_context_parallel_size": 3,
        "cp_kv_cache_interleave_size": 4,
    },
    "P2-T1-W2-elastic": {
        "prefill_context_parallel_size": 2,
        "decode_context_parallel_size": 2,
        "dcp_mode": "elastic",
        "dcp_span_threshold": 48,
    },
    "P2-T2-W4-elastic": {
        "prefill_context_parallel_size": 2,
        "tensor_parallel_size": 2,
        "decode_context_parallel_size": 4,
        "dcp_mode": "elastic",
        "dcp_span_threshold": 48,
    },
    "T2-W2-elastic": {
        "tensor_parallel_size": 2,
        "decode_context_parallel_size": 2,
        "dcp_mode": "elastic",
        "dcp_span_threshold": 48,
    },
    "T3-W3-elastic": {
        "tensor_parallel_size": 3,
        "decode_context_parallel_size": 3,
        "dcp_mode": "elastic",
        "dcp_span_threshold": 48,
        "dcp_comm_backend": "ag_rs",
    },
    "T9-W3": {"tensor_parallel_size": 9, "decode_context_parallel_size": 3},
}
"""Of the 9 query and 3 KV heads of the model: decoupled and copies, both units of placement."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    write_checkpoint(directory, TINY[MODEL], seed=SEED)
    return directory


def prompts(lengths: Sequence[int] = LENGTHS) -> list[list[int]]:
    generator = torch.Generator().manual_seed(11)
    return [torch.randint(203, (n,), generator=generator).tolist() for n in lengths]


def assert_same(got: Sequence[Generation], wanted: Sequence[Generation]) -> None:
    for mine, theirs in zip(got, wanted, strict=True):
        (a,), (b,) = mine.result().outputs, theirs.result().outputs
        assert a.token_ids == b.token_ids
        assert len(a.token_ids) == theirs.params.max_tokens
        for x, y in zip(a.logprobs or (), b.logprobs or (), strict=True):
            worst = max(abs(x[t].logprob - y[t].logprob) for t in x.keys() & y.keys())
            assert worst < 1e-4


def assert_same_tokens(got: Sequence[Generation], wanted: Sequence[Generation]) -> None:
    for mine, theirs in zip(got, wanted, strict=True):
        assert mine.result().outputs[0].token_ids == theirs.result().outputs[0].token_ids


@pytest.fixture(scope="module")
def one_rank(model: Path) -> dict[str, list[Generation]]:
    with engine(model) as llm:
        short = [prompt for prompt in prompts() if len(prompt) < 20]
        return {
            "greedy": generate(llm, prompts(), GREEDY),
            "drawn": generate(llm, prompts(), DRAWN),
            "greedy-long": generate(llm, short, GREEDY_LONG),
            "drawn-long": generate(llm, short, DRAWN_LONG),
        }


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_gives_the_same_text_cold_and_warm(
    layout: str, model: Path, one_rank: dict[str, list[Generation]]
) -> None:
    with engine(model, **LAYOUTS[layout]) as llm:
        assert_same(generate(llm, prompts(), GREEDY), one_rank["greedy"])
        warm = generate(llm, prompts(), GREEDY)
        assert_same(warm, one_rank["greedy"])
        unit = llm.engine.core.plan.hit_unit
        for generation in warm:  # whole units, and never the last token
            hit = (len(generation.prompt_ids) - 1) // unit * unit
            assert generation.num_cached_tokens == hit


@pytest.mark.parametrize("chunk", [16, 17, 1500])
@pytest.mark.parametrize(
    "layout",
    ["T2-W2", "T3-W3-I4", "T8-W8", "P2-T1-W1", "P2-T2-W4", "P2-T1-W2-elastic", "T2-W2-elastic"],
)
def test_chunks_do_not_show(
    layout: str, chunk: int, model: Path, one_rank: dict[str, list[Generation]]
) -> None:
    with engine(model, **LAYOUTS[layout], max_num_batched_tokens=chunk, max_num_seqs=8) as llm:
        assert_same(generate(llm, prompts(), GREEDY), one_rank["greedy"])


@pytest.mark.parametrize("layout", ["T2-W2", "T3-W3-I4", "T4-W4", "T8-W8-I1"])
def test_draws_do_not_depend_on_the_layout(
    layout: str, model: Path, one_rank: dict[str, list[Generation]]
) -> None:
    with engine(model, **LAYOUTS[layout]) as llm:
        assert_same(generate(llm, prompts(), DRAWN), one_rank["drawn"])


@pytest.mark.parametrize(
    "layout", ["T2-W2", "T8-W8", "P2-T1-W1", "P2-T2-W4", "P2-T1-W2-elastic", "T2-W2-elastic"]
)
def test_tokens_alone_are_those_that_come_with_log_probabilities(
    layout: str, model: Path, one_rank: dict[str, list[Generation]]
) -> None:
    """They are chosen from logits that stay where they are, and each coordinate chooses for its rows."""
    with engine(model, **LAYOUTS[layout]) as llm:
        for params, name in ((GREEDY, "greedy"), (DRAWN, "drawn")):
            found = generate(llm, prompts(), msgspec.structs.replace(params, logprobs=None))
            assert_same_tokens(found, one_rank[name])


@pytest.mark.parametrize(
    "layout",
    [
        "T3-W1",
        "T2-W2",
        "T3-W3-I4",
        pytest.param("T8-W8", marks=pytest.mark.slow),
        "P2-T1-W2-elastic",
        "T2-W2-elastic",
    ],
)
def test_preemption_does_not_show(
    layout: str, model: Path, one_rank: dict[str, list[Generation]]
) -> None:
    """A cache that holds little more than one request: the others are recomputed again and again."""
    longest = 224
    with engine(model, **LAYOUTS[layout], max_model_len=longest) as roomy:
        bytes_per_token = roomy.engine.core.reports[0].kv_bytes_per_token
        units = roomy.resolved.cache_layout
    blocks = -(-units.num_units(longest) // units.num_pools) + 1
    memory = blocks * units.block_size * bytes_per_token
    crowd = [prompt for prompt in prompts() if len(prompt) < 20] * 4
    with engine(model, **LAYOUTS[layout], max_model_len=longest, kv_cache_memory=memory) as llm:
        for params, name in ((GREEDY_LONG, "greedy-long"), (DRAWN_LONG, "drawn-long")):
            before = llm.engine.core.stats.preemptions
            assert_same(generate(llm, crowd, params), one_rank[name] * 4)
            assert llm.engine.core.stats.preemptions > before


@pytest.mark.parametrize("layout", ["T2-W2", "T3-W3-I4", "T8-W8", "P2-T2-W4-elastic", "T3-W3-elastic"])
def test_aborts_leave_the_others_alone(
    layout: str, model: Path, one_rank: dict[str, list[Generation]]
) -> None:
    with engine(model, **LAYOUTS[layout], max_num_batched_tokens=32, max_num_seqs=8) as llm:
        empty = llm.engine.core.free_tokens
        kept = [llm.engine.prepare(prompt, GREEDY) for prompt in prompts()]
        victims = [llm.engine.prepare(prompt, GREEDY) for prompt in prompts()]
        for pair in zip(kept, victims, strict=True):
            for generation in pair:
                llm.engine.start(generation)
        doomed = iter(victims)
        while llm.engine.has_work:
            llm.engine.step()
            if (victim := next(doomed, None)) is not None:
                llm.engine.abort(victim)  # queued, in mid-prefill or decoding: one of each
            llm.engine.core.check()
        assert_same(kept, one_rank["greedy"])
        assert llm.engine.core.free_tokens == empty


def test_more_than_one_rank_can_hold_is_served(
    model: Path, one_rank: dict[str, list[Generation]]
) -> None:
    """64 tokens a rank, 8 ranks: 205 prompt tokens and 12 new ones fit in 512, and in no one rank."""
    with engine(model, **LAYOUTS["T8-W8"], max_model_len=240) as roomy:
        bytes_per_token = roomy.engine.core.reports[0].kv_bytes_per_token
    memory = 64 * bytes_per_token
    with engine(model, **LAYOUTS["T8-W8"], max_model_len=240, kv_cache_memory=memory) as llm:
        assert llm.engine.core.plan.tokens_per_rank == 64
        assert llm.engine.core.plan.tokens_total == 512
        assert_same(generate(llm, prompts()[-1:], GREEDY), one_rank["greedy"][-1:])


@pytest.mark.parametrize("comm", ["shm", "gloo"])
@pytest.mark.parametrize("layout", ["T2-W2", "T3-W3-I4", "T4-W4", "P2-T1-W2-elastic"])
def test_processes_give_the_same_text_over_any_transport(
    layout: str, comm: str, model: Path, one_rank: dict[str, list[Generation]]
) -> None:
    options = {**LAYOUTS[layout], "distributed_executor_backend": "mp", "comm": comm}
    with engine(model, **options) as llm:
        assert llm.resolved.comm == comm
        assert_same(generate(llm, prompts(), GREEDY), one_rank["greedy"])
        alone = generate(llm, prompts()[:1], msgspec.structs.replace(GREEDY, logprobs=None))
        assert_same_tokens(alone, one_rank["greedy"][:1])
