"""Steady-state decoding: how long a step takes by context, batch and layout, and where the time goes.

Layouts take turns, a round each, so that a noisy moment meets all of them; the bandwidth of the memory
is measured in every round as well.
"""

import statistics
from collections.abc import Callable, Iterator, Sequence

import msgspec

from kvspan.bench.bandwidth import ReadBandwidth
from kvspan.bench.contender import ROOM_TOKENS, WARM_TOKENS, Case, Contender, Steps
from kvspan.config.engine import EngineConfig
from kvspan.config.sizes import DTYPE_BYTES
from kvspan.cost.reads import kv_bytes_read, weight_bytes_read
from kvspan.errors import ConfigError


class Plan(msgspec.Struct, frozen=True):
    """What is measured.

    Args:
        cases: contexts and batches.
        num_steps: counted in a round.
        num_rounds: of each case and layout.
        breakdown: whether one more round tells where the time goes.
        seed: of prompts and of their keys and values.
    """

    cases: tuple[Case, ...]
    num_steps: int = 32
    num_rounds: int = 3
    breakdown: bool = False
    seed: int = 0

    @property
    def options(self) -> dict[str, object]:
        """Options of an engine that serves the cases.

        Its cache may hold twice as much: what is decoded goes to the pool whose turn it is, and must
        find room there that no prompt's made-up units take up.
        """
        return {
            "max_model_len": self.most_tokens,
            "max_num_seqs": 2 * max(case.batch for case in self.cases),
        }

    @property
    def longest(self) -> int:
        """The longest context."""
        return max(case.context for case in self.cases)

    @property
    def most_tokens(self) -> int:
        """What a sequence of it comes to have."""
        return self.longest + self.num_steps + ROOM_TOKENS


class Decoded(msgspec.Struct, frozen=True):
    """What one layout did with one case.

    Args:
        layout: its name.
        context: tokens of each prompt.
        batch: sequences.
        tokens_per_s: of all sequences, at the median step.
        median_ms: of a step.
        p10_ms: likewise.
        p90_ms: likewise.
        round_ms: the median step of each round.
        bytes_per_step: that all ranks read: weights once, keys and values of all sequences.
        bandwidth: bytes a second that the machine reads, the median of the rounds.
        bandwidth_share: of it that the median step reached.
        ratio: median step over that of the first layout, the median of the rounds.
        worst_ratio: the highest of the rounds.
        breakdown_ms: what a step of rank 0 was spent on; empty if nobody asked.
    """

    layout: str
    context: int
    batch: int
    tokens_per_s: float
    median_ms: float
    p10_ms: float
    p90_ms: float
    round_ms: tuple[float, ...]
    bytes_per_step: float
    bandwidth: float
    bandwidth_share: float
    ratio: float
    worst_ratio: float
    breakdown_ms: dict[str, float]


def measure(
    layouts: Sequence[tuple[str, EngineConfig]],
    plan: Plan,
    *,
    told: Callable[[str], None] = lambda _: None,
) -> Iterator[list[Decoded]]:
    """Starts an engine for each layout and measures them by turns.

    Args:
        layouts: names, empty for one made from what runs, and options.
        plan: what is measured.
        told: called with what is being done.

    Yields:
        For each case in turn, what each layout did.

    Raises:
        ConfigError: a layout cannot run, or its cache does not hold a case.
        ModelError: the model cannot be found or read.
    """
    contenders: list[Contender] = []
    try:
        for name, config in layouts:
            if not config.enable_prefix_caching:
                raise ConfigError(
                    "--no-enable-prefix-caching leaves no way to fill the cache without a prefill: "
                    "leave --enable-prefix-caching on."
                )
            contenders.append(_contender(name, config, plan))
            told(f"{contenders[-1].name} is ready")
        for index, case in enumerate(plan.cases):
            told(f"context {case.context}, batch {case.batch}")
            yield _measure(contenders, case, plan, seed=plan.seed + (index << 32))
    finally:
        for contender in contenders:
            contender.shutdown()


def _contender(name: str, config: EngineConfig, plan: Plan) -> Contender:
    """An engine that serves the cases; refused with the flags that ask for them."""
    asked = f"--context {plan.longest} with --steps {plan.num_steps}"
    needed = f"{asked} needs --max-model-len {plan.most_tokens}"
    if config.max_model_len is not None and config.max_model_len < plan.most_tokens:
        raise ConfigError(
            f"{needed}, and it is {config.max_model_len}: leave it out or raise it, or lower --context."
        )
    try:
        return Contender(config, name=name, watched=plan.breakdown)
    except ConfigError as error:
        if "--max-model-len" not in str(error):
            raise
        raise ConfigError(f"{needed}; a lower --context needs less. {error}") from error


def _measure(contenders: Sequence[Contender], case: Case, plan: Plan, *, seed: int) -> list[Decoded]:
    for contender in contenders:
        contender.fill(case, num_steps=plan.num_steps, seed=seed)
    memory = [ReadBandwidth(_num_threads(contender)) for contender in contenders]
    rounds: list[list[Steps]] = [[] for _ in contenders]
    bandwidths: list[list[float]] = [[] for _ in contenders]
    for _ in range(plan.num_rounds):
        for i, contender in enumerate(contenders):
            bandwidths[i].append(memory[i].measure())
            rounds[i].append(contender.decode(plan.num_steps))
    first = [statistics.median(steps.seconds) for steps in rounds[0]]
    return [
        _decoded(contender, case, plan, rounds[i], first, statistics.median(bandwidths[i]))
        for i, contender in enumerate(contenders)
    ]


def _decoded(
    contender: Contender,
    case: Case,
    plan: Plan,
    rounds: Sequence[Steps],
    first: Sequence[float],
    bandwidth: float,
) -> Decoded:
    seconds = sorted(s for steps in rounds for s in steps.seconds)
    median_s = statistics.median(seconds)
    medians = [statistics.median(steps.seconds) for steps in rounds]
    ratios = [mine / its for mine, its in zip(medians, first, strict=True)]
    step_bytes = _bytes_per_step(contender, case, plan)
    watched = contender.decode(plan.num_steps, watching=True).own_ms() if plan.breakdown else {}
    return Decoded(
        layout=contender.name,
        context=case.context,
        batch=case.batch,
        tokens_per_s=case.batch / median_s,
        median_ms=median_s * 1e3,
        p10_ms=_percentile(seconds, 0.1) * 1e3,
        p90_ms=_percentile(seconds, 0.9) * 1e3,
        round_ms=tuple(s * 1e3 for s in medians),
        bytes_per_step=step_bytes,
        bandwidth=bandwidth,
        bandwidth_share=step_bytes / median_s / bandwidth,
        ratio=statistics.median(ratios),
        worst_ratio=max(ratios),
        breakdown_ms=watched,
    )


def _bytes_per_step(contender: Contender, case: Case, plan: Plan) -> float:
    resolved = contender.resolved
    model, dtype_bytes = resolved.model_config, DTYPE_BYTES[resolved.dtype]
    weights = weight_bytes_read(
        model,
        sum(report.weight_bytes for report in contender.core.reports),
        num_rows=case.batch,
        dtype_bytes=dtype_bytes,
        coordinates=resolved.pcp_size,
        as_team=-(-case.batch // resolved.pcp_size) in resolved.team_rows,
    )
    token_bytes = kv_bytes_read(
        model, resolved.topology, kv_dtype_bytes=DTYPE_BYTES.get(resolved.kv_dtype, 1)
    )
    seen = case.context + WARM_TOKENS + plan.num_steps / 2
    return weights + case.batch * seen * token_bytes


def _num_threads(contender: Contender) -> int:
    return contender.resolved.topology.world_size * contender.resolved.num_threads


def _percentile(ordered: Sequence[float], share: float) -> float:
    return ordered[round(share * (len(ordered) - 1))]
