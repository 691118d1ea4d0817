"""A few layouts with real processes, which thread ranks stand for elsewhere: one rank's text."""

from pathlib import Path

import pytest

from kvspan import LLM, SamplingParams
from kvspan.testing.checkpoints import write_checkpoint
from kvspan.testing.tiny import TINY

PROMPTS = [[7], [3, 1, 4, 1, 5], list(range(100, 140)), list(range(5, 150))]
PARAMS = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
# Keys of cached context travel, from ranks that have much of it and from ranks that have none.
GATHERED = {"max_num_batched_tokens": 33, "max_num_seqs": 4, "prefill_strategy": "allgather_kv"}
OPTIONS = {"dtype": "float32", "kv_cache_memory": "16MiB", "max_model_len": 256, "num_threads": 1}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory: Path = tmp_path_factory.mktemp("model")
    write_checkpoint(directory, TINY["llama-gqa-9x3"], seed=3, shards=2)
    return str(directory)


@pytest.fixture(scope="module")
def one_rank(model: str) -> list[tuple[int, ...]]:
    with LLM(model, **OPTIONS) as llm:
        return [r.outputs[0].token_ids for r in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]


@pytest.mark.parametrize(
    ("tp", "dcp", "options"),
    [
        (2, 2, {}),
        (3, 3, {"cp_kv_cache_interleave_size": 4, "dcp_comm_backend": "ag_rs"}),
        (3, 1, {}),
        (1, 2, {"prefill_context_parallel_size": 2}),
        (3, 1, {"prefill_context_parallel_size": 2}),
        (4, 4, {"max_num_batched_tokens": 17, "max_num_seqs": 4, "dcp_q_replicate": "off"}),
        (3, 3, {**GATHERED, "comm": "shm"}),
        (4, 4, {**GATHERED, "comm": "gloo"}),
    ],
    ids=str,
)
def test_processes_equal_one_rank(
    tp: int, dcp: int, options: dict[str, object], model: str, one_rank: list[tuple[int, ...]]
) -> None:
    layout = {"tensor_parallel_size": tp, "decode_context_parallel_size": dcp}
    with LLM(model, **OPTIONS, **layout, **options) as llm:
        for _ in ("cold", "warm"):
            results = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
            assert [r.outputs[0].token_ids for r in results] == one_rank
