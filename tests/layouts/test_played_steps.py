"""Decode steps that are played from a tape give the bits that the same steps give in Python."""

from collections import Counter
from pathlib import Path
from threading import Barrier
from unittest.mock import patch

import pytest
import torch

from kvspan.comm.local import LocalWorld
from kvspan.config.engine import EngineConfig
from kvspan.config.environment import CPU_ISAS
from kvspan.cost.choice import Choice
from kvspan.engine.build import resolve_engine
from kvspan.layers import linear
from kvspan.layers.matmul import packing_isa
from kvspan.loading.resolve import resolve
from kvspan.models.decoder import Decoder
from kvspan.native import extension
from kvspan.request import SamplingParams
from kvspan.step import NewRequest, Row, Sampled, Step, pack_tokens
from kvspan.testing.checkpoints import write_checkpoint
from kvspan.testing.forward import ForwardCase, forward
from kvspan.testing.ranks import run_ranks, shared_worlds
from kvspan.testing.tiny import TINY, RawConfig, tiny_deepseek_v2, tiny_deepseek_v3, tiny_qwen2_moe
from kvspan.topology import Span, Topology
from kvspan.worker import runner
from kvspan.worker.tape import Tape
from kvspan.worker.worker import Worker
from tests.conftest import SEED

pytestmark = [
    pytest.mark.timeout(100),
    pytest.mark.skipif(packing_isa() is None, reason="only packed products are native throughout"),
]

LENGTHS = (40, 33, 40)  # tables grow past their room, and a sequence ends before the others
DECODED = 4
"""Tokens, after the first."""
_EIGHTS = {"qk_nope_head_dim": 16, "v_head_dim": 24}
"""Sizes that native attention takes."""
_GROUPS = {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}
NATIVE: dict[str, RawConfig] = {
    **{name: TINY[name] for name in ("llama-gqa-9x3", "llama-biases", "qwen3-odd-heads-tied")},
    "qwen2-moe": tiny_qwen2_moe(num_attention_heads=5, num_key_value_heads=1),
    "qwen3-moe": TINY["qwen3-moe"],
    "deepseek-v2-lite-dense": tiny_deepseek_v2(**_EIGHTS, first_k_dense_replace=3),
    "deepseek-v2-groups": tiny_deepseek_v2(**_EIGHTS, **_GROUPS, routed_scaling_factor=16.0),
    "deepseek-v3": tiny_deepseek_v3(**_EIGHTS),
}


def case(
    tp: int = 1,
    dcp: int = 1,
    *,
    pcp: int = 1,
    replicate_q: bool = True,
    kv: str = "bfloat16",
    homes: bool = False,
    pools: bool = False,
    exchange: str = "a2a",
    experts: bool = False,
    team: int = 0,
    few: int = 0,
) -> ForwardCase:
    return ForwardCase(
        team_rows=Span(1, team + 1),
        few_rows=Span(1, few + 1),
        exchange=exchange,
        expert_parallel=experts,
        topology=Topology(tp_size=tp, dcp_size=dcp, pcp_size=pcp),
        replicate_q=replicate_q,
        chunk=1,
        dtype=torch.bfloat16,
        kv_dtype=getattr(torch, kv),
        ranks_are_homes=homes,
        least_tokens_to_split=2,
        random_pools=homes or pools,  # sequences are at home for a while, and then on several ranks
        shared_memory=True,
    )


CASES = {
    "T1": case(),
    "T1-int8": case(kv="int8"),
    "T2": case(2),
    "T2-W2": case(2, 2),
    "T2-W2-ag_rs": case(2, 2, exchange="ag_rs"),
    "T2-W2-gather-ep": case(2, 2, replicate_q=False, experts=True),
    "T2-W2-gather": case(2, 2, replicate_q=False),
    "T3-W3-gather-e4m3": case(3, 3, replicate_q=False, kv="float8_e4m3fn"),
    "T3-W3-ag_rs-ep": case(3, 3, exchange="ag_rs", experts=True),
    "T1-P2-W2": case(1, 2, pcp=2),
    "T1-P2-W2-ag_rs": case(1, 2, pcp=2, exchange="ag_rs"),
    "T1-P2-W2-homes": case(1, 2, pcp=2, pools=True),
    "T2-P2-W4-homes": case(2, 4, pcp=2, pools=True),
    "T2-W2-homes": case(2, 2, homes=True),
    "T2-W2-homes-few": case(2, 2, homes=True, few=8),
    "T1-P2-team": case(1, 1, pcp=2, team=8),
    "T1-P2-W2-team": case(1, 2, pcp=2, team=8),
    "T1-P2-W2-homes-team": case(1, 2, pcp=2, pools=True, team=8),
    "T1-P2-W2-homes-team-few": case(1, 2, pcp=2, pools=True, team=8, few=8),
    "T2-P2-W4-homes-team-ep": case(2, 4, pcp=2, pools=True, team=8, few=8, experts=True),
    "T1-P4-W4-homes-team": case(1, 4, pcp=4, pools=True, team=8),
}


@pytest.fixture(autouse=True)
def recorded_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "STEPS_BEFORE", 0)
    monkeypatch.setattr(runner, "LEAST_ROOM", 10)


@pytest.fixture
def plays(monkeypatch: pytest.MonkeyPatch) -> list[Tape]:
    played: list[Tape] = []
    play = Tape.play
    monkeypatch.setattr(Tape, "play", lambda tape: (played.append(tape), play(tape)))
    return played


@pytest.mark.parametrize("model", NATIVE)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_a_played_step_gives_the_same_bits(
    model: str,
    case: ForwardCase,
    plays: list[Tape],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write_checkpoint(tmp_path, NATIVE[model], seed=SEED, dtype=torch.bfloat16)
    assert_played_as_in_python(tmp_path, case, plays, monkeypatch)


@pytest.mark.parametrize("isa", CPU_ISAS)
@pytest.mark.parametrize("model", ["deepseek-v3", "qwen2-moe"])
def test_experts_are_played_by_the_kernels_of_every_instruction_set(
    model: str, isa: str, plays: list[Tape], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not extension().available(extension().Isa[isa]):
        pytest.skip(f"this build or processor has no {isa}")
    write_checkpoint(tmp_path, NATIVE[model], seed=SEED, dtype=torch.bfloat16)
    monkeypatch.setattr(linear, "packing_isa", lambda: isa)
    assert_played_as_in_python(tmp_path, case(2, 2, experts=True), plays, monkeypatch)


def assert_played_as_in_python(
    model: Path, case: ForwardCase, plays: list[Tape], monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(4)
    sequences = [torch.randint(203, (n,), generator=generator).tolist() for n in LENGTHS]
    played = forward(resolve(str(model)), sequences, case).logits
    assert plays
    plays.clear()
    monkeypatch.setattr(runner, "MOST_ROWS", 0)
    in_python = forward(resolve(str(model)), sequences, case).logits
    assert not plays
    assert all(map(torch.equal, played, in_python))


@pytest.mark.parametrize(
    "name",
    ["T1-P2-W2", "T1-P2-W2-homes", "T2-P2-W4-homes", "T1-P2-W2-homes-team", "T1-P4-W4-homes-team"],
)
def test_most_steps_of_coordinates_are_played(name: str, plays: list[Tape], tmp_path: Path) -> None:
    """Also those in which rows of several coordinates, or local and spread ones, come together."""
    write_checkpoint(tmp_path, TINY["llama-gqa-9x3"], seed=SEED, dtype=torch.bfloat16)
    sequences = [list(range(1, 60)) for _ in range(3)]
    forward(resolve(str(tmp_path)), sequences, CASES[name])
    assert len(plays) >= 0.6 * 59 * CASES[name].topology.world_size  # the others wait, or are recorded


@pytest.mark.parametrize("model", sorted(TINY.keys() - NATIVE.keys()))
def test_a_model_that_is_not_native_throughout_runs_as_it_did(
    model: str, plays: list[Tape], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(tmp_path, TINY[model], seed=SEED, dtype=torch.bfloat16)
    sequences = [list(range(1, 20)), list(range(50, 60))]
    maybe_played = forward(resolve(str(tmp_path)), sequences, case()).logits
    monkeypatch.setattr(runner, "MOST_ROWS", 0)
    in_python = forward(resolve(str(tmp_path)), sequences, case()).logits
    assert all(map(torch.equal, maybe_played, in_python))


def test_a_played_step_tells_of_the_collectives_that_it_makes(tmp_path: Path) -> None:
    """The first step that decodes is recorded, and the others are played."""
    write_checkpoint(tmp_path, TINY["llama-gqa-9x3"], seed=SEED, dtype=torch.bfloat16)
    sizes = {"tensor_parallel_size": 2, "decode_context_parallel_size": 2, "num_threads": 1}
    options = {"model": str(tmp_path), "dtype": "bfloat16", "max_model_len": 64, **sizes}
    resolved, _ = resolve_engine(EngineConfig.from_mapping(options))
    prompt = NewRequest(0, pack_tokens(range(5)), 5, SamplingParams(temperature=0.0), 0)
    with shared_worlds(2) as shared:

        def body(world: LocalWorld) -> list[Counter[tuple[str, str, int]]]:
            worker = Worker(resolved, shared[world.rank], watched=True)
            worker.load()
            worker.allocate_cache(4)
            worker.execute(Step(0, (prompt,), (Row(0, 0, 5, True, (), (0,)),), ()))
            found = []
            for number in range(1, 4):
                worker.watch(True)
                worker.execute(Step(number, (), (Row(0, 4 + number, 1, True, (7,)),), ()))
                spans = worker.watch(False)
                found.append(Counter((s.group, s.op, s.sent_bytes) for s in spans if s.group))
            return found

        for recorded, *played in run_ranks(2, body):
            assert {op for _, op, sent_bytes in recorded if sent_bytes} >= {
                "all_reduce",
                "merge_scatter",
            }
            assert played == [recorded] * 2


def test_a_shape_of_step_is_recorded_when_it_has_come_back(
    plays: list[Tape], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(tmp_path, TINY["llama-gqa-9x3"], seed=SEED, dtype=torch.bfloat16)
    at_once = _decoded(tmp_path, SamplingParams(temperature=0.0), "T1")
    assert len(plays) == DECODED - 1  # the first one is recorded
    plays.clear()
    monkeypatch.setattr(runner, "STEPS_BEFORE", 2)
    assert _decoded(tmp_path, SamplingParams(temperature=0.0), "T1") == at_once
    assert len(plays) == DECODED - 3


@pytest.mark.parametrize("layout", ["T1", "T2-W2", "P2-W2-team"])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1.0, top_p=0.9),
        SamplingParams(temperature=0.0, repetition_penalty=1.3, logprobs=2),
    ],
    ids=["greedy", "drawn", "penalised-with-logprobs"],
)
def test_logits_on_tape_choose_what_logits_in_python_choose(
    params: SamplingParams, layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(tmp_path, TINY["llama-gqa-9x3"], seed=SEED, dtype=torch.bfloat16)
    num_made: list[int] = []
    make = Decoder.logits
    monkeypatch.setattr(
        Decoder, "logits", lambda self, x, team=(): (num_made.append(len(x)), make(self, x, team))[1]
    )
    ranks = 1 if layout == "T1" else 2
    on_tape = _decoded(tmp_path, params, layout)
    if (
        layout != "P2-W2-team" or params.logprobs is None
    ):  # else the first coordinate makes them for itself
        assert len(num_made) == 2 * ranks  # of the prompt, and of the step that is recorded
    num_made.clear()
    monkeypatch.setattr(runner, "MOST_SCORED_ROWS", 0)
    in_python = _decoded(tmp_path, params, layout)
    if layout != "P2-W2-team" or params.logprobs is None:
        assert len(num_made) == (1 + DECODED) * ranks
    assert on_tape == in_python


_SIZES = {
    "T1": {},
    "T2-W2": {"tensor_parallel_size": 2, "decode_context_parallel_size": 2},
    "P2-W2-team": {"prefill_context_parallel_size": 2, "decode_context_parallel_size": 2},
}


def _decoded(model: Path, params: SamplingParams, layout: str) -> list[Sampled]:
    """What rank 0 says of steps in which a prompt and then its own tokens are computed."""
    options = {"model": str(model), "dtype": "bfloat16", "max_model_len": 64, "num_threads": 1}
    with patch(
        "kvspan.cost.choose.choose_team", return_value=Choice(Span(1, 9 if "team" in layout else 1))
    ):
        resolved, _ = resolve_engine(EngineConfig.from_mapping({**options, **_SIZES[layout]}))
    ranks = resolved.topology.world_size
    prompt = NewRequest(0, pack_tokens(range(5)), 5, params, 0)
    with shared_worlds(ranks) as shared:
        tokens = Barrier(ranks)
        said: list[Sampled] = []

        def body(world: LocalWorld) -> None:
            worker = Worker(resolved, shared[world.rank])
            worker.load()
            worker.allocate_cache(4)
            rows = Row(0, 0, 5, True, (), (0,))
            for number in range(1 + DECODED):
                result = worker.execute(Step(number, (prompt,) if number == 0 else (), (rows,), ()))
                said.extend(result.rows)  # of rank 0 alone
                tokens.wait(timeout=60)
                rows = Row(0, 5 + number, 1, True, (said[number].token_id or 0,))

        run_ranks(ranks, body)
    return said
