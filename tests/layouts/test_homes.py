"""A span for each request: whatever lies where, whenever a request crosses, the text is one rank's."""

from collections.abc import Sequence
from pathlib import Path
from unittest.mock import patch

import msgspec
import pytest
import torch

from kvspan import LLM, SamplingParams
from kvspan.cache.placement import home_of
from kvspan.cost.choice import Choice
from kvspan.cost.team import NO_TEAM
from kvspan.engine.engine import Generation
from kvspan.loading.resolve import resolve
from kvspan.models.base import Batch
from kvspan.step import Step
from kvspan.testing.forward import ForwardCase, forward
from kvspan.topology import Span, Topology
from kvspan.worker.share import FEW_ROWS, Shares
from kvspan.worker.worker import Worker
from tests.layouts.engines import engine, generate
from tests.layouts.forwards import assert_same, write_models

# (T, W) with a model whose heads allow it: one DCP group and two, GQA and MLA, biases, cut heads.
RANKS = [
    ((2, 2), "llama-gqa-9x3"),
    ((3, 3), "llama-gqa-9x3"),
    ((4, 2), "llama-gqa"),
    ((4, 4), "llama-biases"),
    ((4, 4), "qwen3-moe"),
    ((2, 2), "deepseek-v2-lite"),
    ((5, 5), "deepseek-v2-groups"),  # slices begin inside heads
    ((4, 2), "deepseek-v3"),
    ((4, 4), "deepseek-v3-plain-rope"),
]
LENGTHS = (5, 1, 66, 118, 33, 8, 16)
THRESHOLD = 48
HOMES = {
    "ranks": {"tensor_parallel_size": 2, "decode_context_parallel_size": 2},
    "coordinates": {"prefill_context_parallel_size": 2, "decode_context_parallel_size": 2},
    "coordinates of two ranks": {
        "tensor_parallel_size": 2,
        "prefill_context_parallel_size": 2,
        "decode_context_parallel_size": 4,
    },
}
HOMES |= {f"{name}, a team": HOMES[name] for name in ("coordinates", "coordinates of two ranks")}
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=2)
LONG = msgspec.structs.replace(GREEDY, max_tokens=60)


def tokens(length: int, *, seed: int = 11) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(203, (length,), generator=generator).tolist()


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_models({name for _, name in RANKS}, tmp_path_factory)


@pytest.mark.parametrize(
    ("exchange", "few_rows"),
    [("a2a", NO_TEAM), ("a2a", FEW_ROWS), ("ag_rs", FEW_ROWS)],
    ids=["a2a", "a2a-all-travel", "ag_rs-all-travel"],
)
@pytest.mark.parametrize("chunk", [10_000, 17, 49])
@pytest.mark.parametrize(("sizes", "name"), RANKS, ids=lambda value: str(value).replace(" ", ""))
def test_keys_at_random_ranks_give_one_ranks_logits(
    sizes: tuple[int, int],
    name: str,
    chunk: int,
    exchange: str,
    few_rows: Span,
    checkpoints: dict[str, Path],
) -> None:
    """Runs of blocks on one pool and another: sequences at home for a while, spread from then on."""
    if exchange == "ag_rs" and name == "deepseek-v2-groups":
        pytest.skip("ag_rs needs slices of whole heads")
    sequences = [tokens(n, seed=i) for i, n in enumerate(LENGTHS)]
    topology = Topology(tp_size=sizes[0], dcp_size=sizes[1])
    case = ForwardCase(
        topology=topology,
        replicate_q=True,
        ranks_are_homes=True,
        random_pools=True,
        chunk=chunk,
        exchange=exchange,
        few_rows=few_rows,
    )
    checkpoint = resolve(str(checkpoints[name]))
    result = forward(checkpoint, sequences, case)
    wanted = forward(checkpoint, sequences, ForwardCase())
    assert_same(result.logits, wanted.logits)
    for number, partition in enumerate((topology.tp_groups(), topology.dcp_groups())):
        for group in partition:
            ops = [[call.op for call in result.group_calls[rank][number]] for rank in group]
            assert all(of_rank == ops[0] for of_rank in ops)


@pytest.mark.parametrize("chunk", [10_000, 17])
@pytest.mark.parametrize("meet_tokens", [10_000, 10])
@pytest.mark.parametrize("team_rows", [NO_TEAM, Span(1, 10_000)], ids=["alone", "team"])
@pytest.mark.parametrize("name", ["llama-gqa-9x3", "deepseek-v2-lite"])
def test_prompts_of_a_home_that_coordinates_share_give_one_ranks_logits(
    name: str, team_rows: Span, meet_tokens: int, chunk: int, checkpoints: dict[str, Path]
) -> None:
    """Where others are spread, and where they meet for the prompt's sake; its keys stay at the home."""
    sequences = [tokens(n, seed=i) for i, n in enumerate(LENGTHS)]
    case = ForwardCase(
        topology=Topology(pcp_size=2, dcp_size=2),
        random_pools=True,
        meet_tokens=meet_tokens,
        team_rows=team_rows,
        few_rows=team_rows,
        least_tokens_to_split=4,
        chunk=chunk,
    )
    checkpoint = resolve(str(checkpoints[name]))
    result = forward(checkpoint, sequences, case)
    wanted = forward(checkpoint, sequences, ForwardCase())
    assert_same(result.logits, wanted.logits)


@pytest.mark.parametrize("name", ["llama-gqa-9x3", "deepseek-v2-lite"])
def test_local_rows_make_no_collective_of_their_group(name: str, checkpoints: dict[str, Path]) -> None:
    """Sequences of a block each: what is left are the sums of tensor parallelism, as many as ever."""
    short = [tokens(n, seed=n) for n in (1, 7, 16, 3, 9)]
    topology = Topology(tp_size=2, dcp_size=2)
    case = ForwardCase(
        topology=topology, replicate_q=True, ranks_are_homes=True, block_size=16, interleave=16
    )
    checkpoint = resolve(str(checkpoints[name]))
    result = forward(checkpoint, short, case)
    static = forward(checkpoint, short, ForwardCase(topology=topology))
    alone = forward(checkpoint, short, ForwardCase())
    assert all(calls == [] for calls in result.dcp_calls)
    assert [len(calls[0]) for calls in result.group_calls] == [
        len(calls[0]) for calls in static.group_calls
    ]
    assert_same(result.logits, alone.logits)


def elastic(model: Path, homes: str, **options: object) -> LLM:
    """A team multiplies whatever few rows there are together, which tiny models are never worth."""
    asked = {"dcp_mode": "elastic", "dcp_span_threshold": THRESHOLD, **HOMES[homes], **options}
    rows = Choice(Span(1, 21 if homes.endswith("a team") else 1))
    with patch("kvspan.cost.choose.choose_team", return_value=rows):
        return engine(model, **asked)


def run(
    llm: LLM, prompts: Sequence[list[int]], params: SamplingParams = GREEDY
) -> list[tuple[tuple[int, ...], list[int | None]]]:
    """Tokens of each prompt's output, and the homes that its request had on the way."""
    homes: dict[int, list[int | None]] = {}

    def look(generations: Sequence[Generation]) -> None:
        for generation in generations:
            seen = homes.setdefault(id(generation), [])
            for home in homes_now(llm, generation):
                if not seen or seen[-1] != home:
                    seen.append(home)

    generations = generate(llm, prompts, params, looked=look)
    return [(g.result().outputs[0].token_ids, homes[id(g)]) for g in generations]


def homes_now(llm: LLM, generation: Generation) -> list[int | None]:
    """Its home, if it holds anything."""
    found = []
    resolved = llm.resolved
    for request in llm.engine.core.look().requests:
        held = {pool for pool, n in enumerate(request.blocks_by_pool) if n}
        if request.num_prompt_tokens == len(generation.prompt_ids) and held:
            home = home_of(held, num_pools=resolved.dcp_size, num_homes=resolved.num_homes)
            assert request.is_local == (home is not None)
            found.append(home)
    return found


def texts(llm: LLM, prompts: Sequence[list[int]], params: SamplingParams = GREEDY) -> list[object]:
    return [output for output, _ in run(llm, prompts, params)]


MODELS = ["llama-gqa-9x3", "deepseek-v2-lite"]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("homes", HOMES)
def test_a_request_that_crosses_in_decode_goes_on(
    homes: str, name: str, checkpoints: dict[str, Path]
) -> None:
    prompts = [tokens(5), tokens(33), tokens(40), tokens(150)]
    with engine(checkpoints[name]) as llm:
        wanted = texts(llm, prompts, LONG)
    with elastic(checkpoints[name], homes) as llm:
        got = run(llm, prompts, LONG)
        stats = llm.engine.core.stats
    assert [output for output, _ in got] == wanted
    assert all(seen[0] is not None and seen[-1] is None for _, seen in got[:3])
    assert got[3][1] == [None]
    assert 0 < stats.exchange_steps <= stats.steps


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("homes", HOMES)
def test_prefixes_at_home_and_spread_are_hit_from_anywhere(
    homes: str, name: str, checkpoints: dict[str, Path]
) -> None:
    """A prompt that begins at somebody's home and goes on over all ranks; one that begins spread."""
    short, long = tokens(40), tokens(200, seed=3)
    extended, shortened = [*short, *tokens(90, seed=4)], [*long[:100], *tokens(20, seed=5)]
    with engine(checkpoints[name]) as llm:
        wanted = [texts(llm, [p]) for p in (short, long, extended, shortened, short[:36])]
    with elastic(checkpoints[name], homes, max_num_batched_tokens=48, max_num_seqs=8) as llm:
        got = [run(llm, [p]) for p in (short, long, extended, shortened, short[:36])]
    assert [[output for output, _ in its] for its in got] == wanted
    assert got[2][0][1] == [None]  # it holds the home's blocks and others
    assert got[3][0][1] == [None]
    assert got[4][0][1] == got[0][0][1][:1]  # the hit makes that rank its home


@pytest.mark.parametrize("homes", ["ranks", "coordinates"])
def test_short_traffic_never_meets(homes: str, checkpoints: dict[str, Path]) -> None:
    with elastic(checkpoints["llama-gqa-9x3"], homes) as llm:
        run(llm, [tokens(n, seed=n) for n in (5, 20, 30, 33)])
        run(llm, [[*tokens(33, seed=33), *tokens(2)]])  # finds 32 tokens at home
        stats = llm.engine.core.stats
    assert stats.cached_tokens == 32
    assert stats.exchange_steps == stats.kv_gathers == stats.q_gathers == 0


@pytest.mark.parametrize("homes", ["coordinates", "coordinates, a team"])
def test_steps_of_a_team_are_counted_as_ranks_make_them(
    homes: str, checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts of a full step are too many rows for a team; requests come to lie on both coordinates."""
    prepare, made = Worker.prepare, []

    def noting(worker: Worker, step: Step) -> tuple[Shares, Batch]:
        shares, batch = prepare(worker, step)
        made.append(bool(shares.team))
        return shares, batch

    monkeypatch.setattr(Worker, "prepare", noting)
    with elastic(checkpoints["llama-gqa-9x3"], homes) as llm:
        run(llm, [tokens(n, seed=n) for n in (5, 33, 40, 150)], LONG)
        stats = llm.engine.core.stats
    assert made.count(True) == 2 * stats.team_steps
    assert (0 < stats.team_steps < stats.steps) == homes.endswith("a team")


@pytest.mark.parametrize("homes", ["ranks", "coordinates"])
def test_a_full_home_spreads_a_request_early_and_nobody_is_preempted(
    homes: str, checkpoints: dict[str, Path]
) -> None:
    """Each home has room for 12 blocks, and three requests come to have 7 each."""
    model = checkpoints["llama-gqa-9x3"]
    prompts = [tokens(n, seed=n) for n in (40, 46, 44)]
    with engine(model) as llm:
        wanted = texts(llm, prompts, LONG)
        token_bytes = llm.engine.core.reports[0].kv_bytes_per_token
    memory = 12 * 16 * token_bytes
    with elastic(model, homes, kv_cache_memory=memory, max_model_len=128, dcp_span_threshold=120) as llm:
        got = run(llm, prompts, LONG)
        stats = llm.engine.core.stats
    assert [output for output, _ in got] == wanted
    assert stats.spills > 0
    assert stats.preemptions == 0


@pytest.mark.parametrize("homes", ["ranks", "coordinates"])
def test_long_requests_have_what_a_span_for_all_gives_them(
    homes: str, checkpoints: dict[str, Path]
) -> None:
    """Equal tokens for equal memory; one that fits no single rank is served."""
    model = checkpoints["llama-gqa-9x3"]
    with engine(model) as llm:
        token_bytes = llm.engine.core.reports[0].kv_bytes_per_token
        wanted = texts(llm, [tokens(205)])
    options = {"kv_cache_memory": 128 * token_bytes, "max_model_len": 240}
    with engine(model, **HOMES[homes], **options) as llm:
        static = llm.engine.core.plan
    with elastic(model, homes, **options) as llm:
        plan = llm.engine.core.plan
        assert plan.tokens_per_rank == 128
        assert plan.tokens_total == static.tokens_total
        assert texts(llm, [tokens(205)]) == wanted


@pytest.mark.parametrize("homes", HOMES)
def test_aborts_at_any_moment_give_all_blocks_back(homes: str, checkpoints: dict[str, Path]) -> None:
    """Before its first step, at home, in the step of its crossing, and spread; cold and with hits."""
    model = checkpoints["llama-gqa-9x3"]
    with elastic(model, homes, max_num_batched_tokens=32, max_num_seqs=8) as llm:
        empty = llm.engine.core.free_tokens
        for num_steps in range(24):
            for prompt in (tokens(40), [*tokens(40), *tokens(70, seed=2)]):
                doomed = llm.engine.prepare(prompt, LONG)
                llm.engine.start(doomed)
                for _ in range(num_steps):
                    llm.engine.step()
                llm.engine.abort(doomed)
                llm.engine.core.check()
        while llm.engine.has_work:
            llm.engine.step()
        assert llm.engine.core.free_tokens == empty
