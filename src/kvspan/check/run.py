"""Runs the same prompts on one rank and on a layout, and says whether they agree.

Prompts are batched; each layout runs unchunked with a cold prefix cache, again with a warm one, and in
chunks that divide nothing. In a narrower dtype, runs are forced along float32's tokens.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib import resources

import numpy as np

from kvspan.check.compare import Exact, Narrow, Position, compare_exact, compare_narrow
from kvspan.config.engine import EngineConfig
from kvspan.config.resolved import Resolved
from kvspan.engine.build import resolve_engine
from kvspan.engine.llm import LLM
from kvspan.errors import ConfigError
from kvspan.loading.tokenizer import Tokenizer
from kvspan.request import Logprob, RequestOutput, SamplingParams

PROMPT_LENGTHS = (1, 5, 32, 33, 129, 2000)
OUTPUT_TOKENS = 16
LEAST_POSITIONS = 2000
"""Positions that are compared: a 99th percentile of fewer would hang on a handful of them. Where there
is no room for the longest prompt there are several of each of the others."""

CHUNK_TOKENS = 49
"""Tokens of a step in the chunked runs: divides no prompt and no block."""

NEAR_TOKENS = 20
"""Most probable tokens among which another run's best one is looked for."""

Tokens = Sequence[int]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came of a check.

    Args:
        layout: what ran beside one rank.
        prompt_lengths: tokens of each prompt.
        exact: float32 runs.
        narrow: runs in the asked dtype; empty if that is float32.
    """

    layout: Resolved
    prompt_lengths: tuple[int, ...]
    exact: tuple[Exact, ...]
    narrow: tuple[Narrow, ...]

    @property
    def holds(self) -> bool:
        """Whether every run is within its bounds."""
        return all(run.holds for run in self.exact) and all(run.holds for run in self.narrow)


def check(asked: EngineConfig, *, told: Callable[[str], None] = lambda _: None) -> Verdict:
    """Compares a layout with one rank.

    Args:
        asked: the model and the layout.
        told: called with what is about to run.

    Raises:
        ConfigError: the layout cannot run or has replicas, or its `--max-model-len` leaves no room for
            any prompt.
    """
    asked.refuse_replicas()
    resolved, tokenizer = resolve_engine(asked)
    prompts = _prompts(resolved, tokenizer)
    # No more room than the prompts need: a cache for the model's whole context may not fit here.
    longest = max(map(len, prompts)) + OUTPUT_TOKENS
    asked = replace(
        asked,
        max_model_len=min(longest + 1, resolved.max_model_len),
        max_num_batched_tokens=sum(map(len, prompts)) + OUTPUT_TOKENS * len(prompts),  # no chunks
        max_num_seqs=None,
    )
    exact, outputs = _check_exact(asked, prompts, told)
    narrow: tuple[Narrow, ...] = ()
    if resolved.dtype != "float32" or resolved.kv_dtype != "float32":
        sequences = [[*p, *out] for p, out in zip(prompts, outputs, strict=True)]
        narrow = _check_narrow(asked, sequences, resolved.dtype, told)
    return Verdict(resolved, tuple(map(len, prompts)), exact, narrow)


def _check_exact(
    asked: EngineConfig, prompts: Sequence[Tokens], told: Callable[[str], None]
) -> tuple[tuple[Exact, ...], list[Tokens]]:
    """float32: greedy outputs of one rank and of the layout, and one rank's tokens."""
    exact = replace(asked, dtype="float32", kv_cache_dtype="float32")
    told("float32, one rank")
    with _llm(_one_rank(exact)) as llm:
        wanted, tokens = _greedy(llm, prompts)
    runs = []
    told("float32, the layout")
    with _llm(exact) as llm:
        for name in ("prefix cache cold", "prefix cache warm"):
            runs.append(compare_exact(name, wanted, _greedy(llm, prompts)[0]))
    told(f"float32, the layout in chunks of {CHUNK_TOKENS}")
    with _llm(_chunked(exact)) as llm:
        name = f"chunks of {CHUNK_TOKENS}"
        runs.append(compare_exact(name, wanted, _greedy(llm, prompts)[0]))
    return tuple(runs), tokens


def _check_narrow(
    asked: EngineConfig, sequences: Sequence[Tokens], dtype: str, told: Callable[[str], None]
) -> tuple[Narrow, ...]:
    """The asked dtype: log-probabilities along float32's tokens."""
    told(f"{dtype}, one rank beside float32")
    with _llm(_one_rank(replace(asked, dtype="float32", kv_cache_dtype="float32"))) as llm:
        exact, exact_hits = _scores(llm, sequences), _after_hits(llm, sequences)
    with _llm(_one_rank(asked)) as llm:
        near, near_hits = _scores(llm, sequences), _after_hits(llm, sequences)
    told(f"{dtype}, the layout")
    with _llm(asked) as llm:
        far, far_hits = _scores(llm, sequences), _after_hits(llm, sequences)
    told(f"{dtype}, the layout in chunks of {CHUNK_TOKENS}")
    with _llm(_chunked(asked)) as llm:
        chunked = _scores(llm, sequences)
    best = [min(each.items(), key=lambda item: item[1].rank)[0] for each in exact_hits]
    hits = [[_positions(run, best)] for run in (exact_hits, near_hits, far_hits)]
    return (
        compare_narrow("prefix cache cold", exact, near, far),
        compare_narrow("prefix cache warm", *hits),
        compare_narrow(f"chunks of {CHUNK_TOKENS}", exact, near, chunked),
    )


def _one_rank(asked: EngineConfig) -> EngineConfig:
    return replace(
        asked,
        tensor_parallel_size=1,
        decode_context_parallel_size=1,
        prefill_context_parallel_size=1,
        cp_kv_cache_interleave_size=None,
        kv_cache_memory=None,  # what was asked for may be enough for several ranks only
        dcp_comm_backend="auto",
        dcp_mode="static",
        dcp_q_replicate="auto",
        prefill_strategy="auto",
        distributed_executor_backend="auto",
    )


def _chunked(asked: EngineConfig) -> EngineConfig:
    return replace(
        asked, max_num_batched_tokens=CHUNK_TOKENS, max_num_seqs=8, enable_chunked_prefill=True
    )


def _llm(asked: EngineConfig) -> LLM:
    return LLM.from_config(asked)


def _prompts(resolved: Resolved, tokenizer: Tokenizer | None) -> list[Tokens]:
    """Prompts of the lengths that there is room for: real text, or random tokens without a tokenizer."""
    room = resolved.max_model_len - OUTPUT_TOKENS
    lengths = [n for n in PROMPT_LENGTHS if n <= room]
    if not lengths:
        raise ConfigError(
            f"--max-model-len {resolved.max_model_len} leaves no room for a prompt and {OUTPUT_TOKENS} "
            "tokens of output."
        )
    each = sum(lengths) + OUTPUT_TOKENS * len(lengths)
    lengths *= math.ceil(LEAST_POSITIONS / each)
    if tokenizer is None:
        draws = np.random.default_rng(resolved.seed)
        return [draws.integers(resolved.model_config.vocab_size, size=n).tolist() for n in lengths]
    text = resources.files("kvspan").joinpath("data/constitution.txt").read_text("utf-8")
    tokens = tokenizer.encode(text)
    starts = np.cumsum([0, *lengths[:-1]]) % max(len(tokens) - max(lengths), 1)
    return [tokens[start : start + n] for start, n in zip(starts.tolist(), lengths, strict=True)]


def _greedy(llm: LLM, prompts: Sequence[Tokens]) -> tuple[list[list[Position]], list[Tokens]]:
    """Greedy outputs, as positions and as tokens."""
    params = SamplingParams(temperature=0, max_tokens=OUTPUT_TOKENS, ignore_eos=True, logprobs=2)
    outputs = [result.outputs[0] for result in llm.generate(prompts, params, use_tqdm=False)]
    positions = [
        [_position(each, token) for each, token in zip(o.logprobs or (), o.token_ids, strict=True)]
        for o in outputs
    ]
    return positions, [o.token_ids for o in outputs]


def _scores(llm: LLM, sequences: Sequence[Tokens]) -> list[list[Position]]:
    """What a run says of every position of given sequences but the first."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=2)
    results = llm.generate(sequences, params, use_tqdm=False)
    return [_scored(result) for result in results]


def _scored(result: RequestOutput) -> list[Position]:
    scored = zip(result.prompt_logprobs or (), result.prompt_token_ids, strict=True)
    return [_position(each, token) for each, token in scored if each is not None]


def _after_hits(llm: LLM, sequences: Sequence[Tokens]) -> list[dict[int, Logprob]]:
    """The most probable tokens after each of the last beginnings of sequences, which all hit the cache.

    `_scores` has left the sequences in the cache.
    """
    beginnings = [s[:n] for s in sequences for n in range(max(len(s) - OUTPUT_TOKENS, 1), len(s))]
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=NEAR_TOKENS)
    results = llm.generate(beginnings, params, use_tqdm=False)
    return [(r.outputs[0].logprobs or ({},))[0] for r in results]


def _positions(run: Sequence[dict[int, Logprob]], tokens: Sequence[int]) -> list[Position]:
    """Positions at which the token of interest is float32's best one; far below all that is listed
    if it is not among them."""
    floor = Logprob(logprob=-1e3, rank=0)
    return [_position({token: floor, **each}, token) for each, token in zip(run, tokens, strict=True)]


def _position(listed: dict[int, Logprob], token: int) -> Position:
    ranked = sorted(
        ((each.logprob, i) for i, each in listed.items() if each.rank in (1, 2)), reverse=True
    )
    (first, best), (second, _) = ranked[0], ranked[-1]
    return Position(listed[token].logprob, best, first - second)
