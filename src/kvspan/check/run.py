"""Runs the same prompts on one rank and on a layout, and says whether they agree.

Prompts are batched; each layout runs unchunked with a cold prefix cache, again with a warm one, and in
chunks that divide nothing. In a narrower dtype, runs are forced along float32's tokens.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
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
Generate = Callable[[Sequence[Tokens], SamplingParams], list[RequestOutput]]
"""Runs prompts on an engine, batched."""


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


@dataclass(frozen=True, slots=True)
class Stage:
    """What a check is about to do.

    Args:
        run: which of the engines, from 1.
        num_runs: how many there are.
        what: the dtype, the ranks, and how prompts are cut.
        num_prompts: that it is about to compute; None = it loads the weights first.
    """

    run: int
    num_runs: int
    what: str
    num_prompts: int | None


def check(
    asked: EngineConfig, *, told: Callable[[Stage], None] = lambda _: None, use_tqdm: bool = False
) -> Verdict:
    """Compares a layout with one rank.

    Args:
        asked: the model and the layout.
        told: called with what is about to run.
        use_tqdm: show the prompts of each run on a terminal.

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
    narrows = resolved.dtype != "float32" or resolved.kv_dtype != "float32"
    engines = _Engines(told, num_runs=6 if narrows else 3, num_prompts=len(prompts), use_tqdm=use_tqdm)
    wanted = _run_wanted(asked, prompts, engines, narrows=narrows)
    exact = _check_exact(asked, prompts, wanted, engines)
    narrow = _check_narrow(asked, wanted, engines, resolved.dtype) if narrows else ()
    return Verdict(resolved, tuple(map(len, prompts)), exact, narrow)


class _Engines:
    """Loads one engine after another, and says so.

    Args:
        told: called with what is about to run.
        num_runs: engines in all.
        num_prompts: of each run.
        use_tqdm: show a run's prompts on a terminal.
    """

    def __init__(
        self, told: Callable[[Stage], None], *, num_runs: int, num_prompts: int, use_tqdm: bool
    ) -> None:
        self._told, self._num_runs, self._num_prompts = told, num_runs, num_prompts
        self._use_tqdm, self._run = use_tqdm, 0

    @contextmanager
    def load(self, what: str, asked: EngineConfig) -> Iterator[Generate]:
        """An engine, as what runs prompts on it."""
        self._run += 1
        self._told(Stage(self._run, self._num_runs, what, None))
        with LLM.from_config(asked) as llm:
            self._told(Stage(self._run, self._num_runs, what, self._num_prompts))
            yield partial(llm.generate, use_tqdm=self._use_tqdm)


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What one rank gives in float32.

    Args:
        greedy: positions of its outputs.
        sequences: prompts with these outputs.
        scores: what it says of every position of them but the first; empty if nobody needs it.
        hits: the same after beginnings that are in the cache.
    """

    greedy: list[list[Position]]
    sequences: Sequence[Tokens]
    scores: list[list[Position]]
    hits: list[dict[int, Logprob]]


def _run_wanted(
    asked: EngineConfig, prompts: Sequence[Tokens], engines: _Engines, *, narrows: bool
) -> _Wanted:
    exact = replace(asked, dtype="float32", kv_cache_dtype="float32")
    with engines.load("float32, one rank", _one_rank(exact)) as generate:
        greedy, outputs = _greedy(generate, prompts)
        sequences = [[*p, *out] for p, out in zip(prompts, outputs, strict=True)]
        if not narrows:
            return _Wanted(greedy, sequences, [], [])
        return _Wanted(greedy, sequences, _scores(generate, sequences), _after_hits(generate, sequences))


def _check_exact(
    asked: EngineConfig, prompts: Sequence[Tokens], wanted: _Wanted, engines: _Engines
) -> tuple[Exact, ...]:
    """float32: greedy outputs of the layout."""
    exact = replace(asked, dtype="float32", kv_cache_dtype="float32")
    chunks = f"chunks of {CHUNK_TOKENS}"
    found = {}
    with engines.load("float32, the layout", exact) as generate:
        for name in ("prefix cache cold", "prefix cache warm"):
            found[name], _ = _greedy(generate, prompts)
    with engines.load(f"float32, the layout in {chunks}", _chunked(exact)) as generate:
        found[chunks], _ = _greedy(generate, prompts)
    return tuple(compare_exact(name, wanted.greedy, run) for name, run in found.items())


def _check_narrow(
    asked: EngineConfig, wanted: _Wanted, engines: _Engines, dtype: str
) -> tuple[Narrow, ...]:
    """The asked dtype: log-probabilities along float32's tokens."""
    sequences = wanted.sequences
    chunks = f"chunks of {CHUNK_TOKENS}"
    with engines.load(f"{dtype}, one rank", _one_rank(asked)) as generate:
        near, near_hits = _scores(generate, sequences), _after_hits(generate, sequences)
    with engines.load(f"{dtype}, the layout", asked) as generate:
        far, far_hits = _scores(generate, sequences), _after_hits(generate, sequences)
    with engines.load(f"{dtype}, the layout in {chunks}", _chunked(asked)) as generate:
        chunked = _scores(generate, sequences)
    best = [min(each.items(), key=lambda item: item[1].rank)[0] for each in wanted.hits]
    hits = [[_positions(run, best)] for run in (wanted.hits, near_hits, far_hits)]
    return (
        compare_narrow("prefix cache cold", wanted.scores, near, far),
        compare_narrow("prefix cache warm", *hits),
        compare_narrow(chunks, wanted.scores, near, chunked),
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


def _greedy(generate: Generate, prompts: Sequence[Tokens]) -> tuple[list[list[Position]], list[Tokens]]:
    """Greedy outputs, as positions and as tokens."""
    params = SamplingParams(temperature=0, max_tokens=OUTPUT_TOKENS, ignore_eos=True, logprobs=2)
    outputs = [result.outputs[0] for result in generate(prompts, params)]
    positions = [
        [_position(each, token) for each, token in zip(o.logprobs or (), o.token_ids, strict=True)]
        for o in outputs
    ]
    return positions, [o.token_ids for o in outputs]


def _scores(generate: Generate, sequences: Sequence[Tokens]) -> list[list[Position]]:
    """What a run says of every position of given sequences but the first."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=2)
    results = generate(sequences, params)
    return [_scored(result) for result in results]


def _scored(result: RequestOutput) -> list[Position]:
    scored = zip(result.prompt_logprobs or (), result.prompt_token_ids, strict=True)
    return [_position(each, token) for each, token in scored if each is not None]


def _after_hits(generate: Generate, sequences: Sequence[Tokens]) -> list[dict[int, Logprob]]:
    """The most probable tokens after each of the last beginnings of sequences, which all hit the cache.

    `_scores` has left the sequences in the cache.
    """
    beginnings = [s[:n] for s in sequences for n in range(max(len(s) - OUTPUT_TOKENS, 1), len(s))]
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=NEAR_TOKENS)
    results = generate(beginnings, params)
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
