"""A deployment that serves like requests for ever: closed formulas for what the simulator replays.

A closed loop: `concurrency` users ask again as soon as they are answered. Of them some run, as far as
the cache has room; of those that run most decode, and some have their prompts computed, in chunks that
share the steps. Knows no order of arrival and no variance: the simulator does.
"""

from dataclasses import dataclass, replace

from kvspan.cost.steptime import StepCost
from kvspan.cost.work import StepWork, decode_work
from kvspan.plan.capacity import Capacity
from kvspan.plan.load import Load

_ROUNDS = 40  # of halving the distance to the fixed point: far below any figure shown


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Of a step, as the scheduler has them.

    Args:
        max_num_seqs: requests that run at once.
        max_num_batched_tokens: tokens of a step.
    """

    max_num_seqs: int
    max_num_batched_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Steady:
    """What one replica does for so many users.

    Args:
        concurrency: users.
        running: requests that the cache has room for, at most all.
        hit_rate: share of prompts' tokens that are found in the cache.
        ttft_s: seconds to the first token, waiting for room among them.
        tpot_s: seconds from a token to the next.
        output_tok_s: tokens of output a second.
        computed_tok_s: tokens of prompts computed a second.
        input_tok_s: tokens of prompts a second, cached ones among them.
    """

    concurrency: int
    running: int
    hit_rate: float
    ttft_s: float
    tpot_s: float
    output_tok_s: float
    computed_tok_s: float
    input_tok_s: float


def steady_state(
    cost: StepCost, capacity: Capacity, load: Load, limits: Limits, *, concurrency: int
) -> Steady:
    """The steady state of one replica.

    Args:
        cost: of its steps.
        capacity: which holds one request at least.
        load: every request.
        limits: of a step.
        concurrency: users, at least 1.
    """
    room = requests_with_room(capacity, load)
    running = max(min(concurrency, room, limits.max_num_seqs), 1)
    # Who waits for room holds none, so what is kept of an earlier turn has made room by then.
    known = load.shared_tokens + (load.kept_tokens if concurrency <= room else 0)
    hits = min(known, load.input_tokens - 1) // capacity.hit_unit * capacity.hit_unit
    computed = load.input_tokens - hits
    budget = limits.max_num_batched_tokens
    decoding = _decoding(running, computed, load.output_tokens, budget)
    arriving = decoding / load.output_tokens  # prompts a step, and one that arrives is begun at once
    chunk = min(max(budget - decoding, 1.0), computed * max(arriving, 1.0))
    with_chunk = min(arriving * computed / chunk, 1.0)  # share of steps

    decodes = decode_work(load.input_tokens + load.output_tokens / 2, batch=decoding)
    plain = cost.step_s(decodes)
    beside = cost.step_s(replace(decodes, only_decodes=False))
    mixed = beside + _chunk_s(cost, hits, computed, chunk)
    step_s = (1 - with_chunk) * plain + with_chunk * mixed
    rate = decoding / load.output_tokens / step_s
    by_others = with_chunk * (running - 1) / running  # nobody decodes beside their own prompt
    tpot_s = (1 - by_others) * plain + by_others * mixed
    full, left = divmod(computed, chunk) if chunk < computed else (1, 0)
    prompt_s = full * mixed
    if left:  # of a prompt its last tokens take a step of their own, however few they are
        prompt_s += beside + _chunk_s(cost, hits + computed - left, left, left)
    return Steady(
        concurrency=concurrency,
        running=running,
        hit_rate=hits / load.input_tokens,
        ttft_s=max(concurrency / rate - load.output_tokens * tpot_s, prompt_s),
        tpot_s=tpot_s,
        output_tok_s=rate * load.output_tokens,
        computed_tok_s=rate * computed,
        input_tok_s=rate * load.input_tokens,
    )


def requests_with_room(capacity: Capacity, load: Load) -> int:
    """Requests that the cache holds at once; the shared part lies there once."""
    unit = capacity.hit_unit
    shared = load.shared_tokens // unit * unit
    own = -(-(load.input_tokens + load.output_tokens - shared) // unit) * unit
    return max((capacity.tokens - shared) // own, 0)


def _decoding(running: int, computed: int, output: int, budget: int) -> float:
    """Of the running requests, how many decode in the mean: the others have their prompts computed.

    Prompts take `computed / (budget - decoding)` steps each, and as many begin as end; and a step has
    no room for more prompt tokens than `budget - decoding`.
    """
    most = budget / (1 + computed / output)
    decoding = float(min(running, most))
    for _ in range(_ROUNDS):
        steps = max(computed / max(budget - decoding, 1.0), 1.0)
        decoding = (decoding + min(running / (1 + steps / output), most)) / 2
    return decoding


def _chunk_s(cost: StepCost, hits: float, computed: float, chunk: float) -> float:
    """Seconds by which a chunk of prompts makes a step longer."""
    prompts = max(chunk / computed, 1.0)
    tokens = chunk / prompts  # of each prompt in the step
    start, num_tokens = hits + (computed - tokens) / 2, tokens
    special = cost.ways.of([(start, num_tokens)])
    work = StepWork(
        num_tokens=chunk,
        num_sampled=prompts,
        keys=prompts * (start + num_tokens),
        pairs=chunk * (start + num_tokens / 2),
        only_decodes=False,
        **{name: prompts * value for name, value in special.items()},
    )
    nothing = StepWork(num_tokens=0, num_sampled=0, keys=0, pairs=0)
    return max(cost.step_s(work) - cost.step_s(nothing), 0.0)
