"""What the user asks of a plan: model, hardware, load and goal. Knows names and kinds."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from kvspan.config.engine import DEFAULT_BLOCK_SIZE
from kvspan.config.options import (
    FRACTION,
    SWITCH,
    TEXT,
    TOKENS,
    Kind,
    OptionGroup,
    canonical,
    choice,
    option,
    options_of,
    required,
    whole,
)
from kvspan.config.sizes import KV_DTYPE_BYTES
from kvspan.cost.choose import DEFAULT_BATCHED_TOKENS, DEFAULT_NUM_SEQS, GPU_FRACTION
from kvspan.cost.weights import WEIGHT_BITS
from kvspan.errors import ConfigError

MAX_GPUS = 100_000
"""Far beyond any one fleet: more is a slip of the finger."""
MAX_TOKENS = 1 << 30
GOALS = ("throughput", "latency", "capacity")

_MODEL, _HARDWARE = OptionGroup.MODEL, OptionGroup.HARDWARE
_LIMITS, _LOAD = OptionGroup.SCHEDULING, OptionGroup.LOAD


def _read_duration(value: object) -> float:
    """Seconds: `5s`, `50ms`, or a number of seconds."""
    match = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?) ?(s|ms|us|)", str(value).strip())
    seconds = float(match[1]) * {"s": 1, "": 1, "ms": 1e-3, "us": 1e-6}[match[2]] if match else math.nan
    if isinstance(value, bool) or not seconds > 0:
        raise ValueError("is not a time over 0 such as 5s or 50ms")
    return seconds


def _read_share(value: object) -> float:
    try:
        number = math.nan if isinstance(value, bool) else float(str(value))
    except ValueError:
        number = math.nan
    if not 0 <= number < 1:
        raise ValueError("is not a share from 0 to under 1, such as 0.5")
    return number


DURATION: Kind[float] = Kind(metavar="TIME", read=_read_duration)
SHARE: Kind[float] = Kind(metavar="SHARE", read=_read_share)


@dataclass(frozen=True, kw_only=True)
class PlanAsked:
    """What was asked, every value read and checked by its kind.

    Raises:
        ConfigError: a value is not one that its option takes, or two do not go together.
    """

    model: str = required(
        TEXT, "a model that kvspan has facts of, a directory, a config file or a hub id", _MODEL
    )
    weights_dtype: str = option(
        choice("auto", *WEIGHT_BITS),
        "auto",
        "of the weights; auto is the checkpoint's",
        _MODEL,
    )
    kv_cache_dtype: str = option(
        choice(
            *KV_DTYPE_BYTES,
            aliases={"auto": "bfloat16", "bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
            | {"fp8": "fp8_e4m3"},
        ),
        "bfloat16",
        "of cached keys and values",
        _MODEL,
    )
    max_model_len: int | None = option(
        TOKENS, None, "tokens of prompt and output; auto is what the model was made for", _MODEL
    )
    hardware: str = option(TEXT, "B200-SXM", "accelerator, a row of the facts", _HARDWARE)
    gpus: int = option(whole(1, MAX_GPUS), 8, "how many of them", _HARDWARE)
    gpu_memory_utilization: float = option(
        FRACTION, GPU_FRACTION, "fraction of each GPU for weights and KV cache", _HARDWARE
    )
    enable_expert_parallel: bool = option(
        SWITCH, False, "keep whole experts on each rank, and not a part of each", _HARDWARE
    )
    block_size: int = option(
        whole(8, 2**16, multiple_of=8), DEFAULT_BLOCK_SIZE, "B: tokens of a block", _LIMITS
    )
    max_num_seqs: int = option(
        whole(1), DEFAULT_NUM_SEQS, "requests that run at once in a replica", _LIMITS
    )
    max_num_batched_tokens: int = option(
        TOKENS, DEFAULT_BATCHED_TOKENS, "tokens of a step at the most", _LIMITS
    )
    input: int | None = option(
        TOKENS,
        None,
        "tokens of a prompt, in the mean",
        _LOAD,
        unsaid="8192, or less if the model has less room",
    )
    output: int = option(TOKENS, 512, "tokens that it gets", _LOAD)
    shared_prefix: float = option(
        SHARE, 0.0, "share of a prompt that all requests begin with alike", _LOAD
    )
    new_tokens: int | None = option(
        TOKENS,
        None,
        "tokens of a prompt that its session's turn before did not have",
        _LOAD,
        unsaid="every request is a session",
    )
    turns: int = option(whole(1, 10_000), 1, "turns of a session, for --simulate", _LOAD)
    concurrency: int | None = option(
        whole(1, 1_000_000),
        None,
        "users who ask at once, all replicas together",
        _LOAD,
        unsaid="a sweep",
    )
    requests: int | None = option(
        whole(1, 10_000_000), None, "requests to simulate", _LOAD, unsaid="4 a user"
    )
    ttft: float | None = option(DURATION, None, "longest time to the first token", _LOAD, unsaid="any")
    tpot: float | None = option(
        DURATION, None, "longest time to each further token", _LOAD, unsaid="any"
    )
    goal: str = option(choice(*GOALS), "throughput", "what the best layout is best at", _LOAD)

    def __post_init__(self) -> None:
        for each in PLAN_OPTIONS:
            # The one write: a value comes in as the user spelled it and is kept as its kind reads it.
            object.__setattr__(self, each.name, each.read(vars(self)[each.name]))
        for flag, tokens in (("--input", self.input), ("--output", self.output)):
            if tokens is not None and tokens > MAX_TOKENS:
                raise ConfigError(
                    f"{flag} {tokens} is absurd: a request has {MAX_TOKENS} tokens at most."
                )
        if self.turns > 1 and self.new_tokens is None:
            raise ConfigError(
                f"--turns {self.turns} needs --new-tokens: what a turn adds to the prompt."
            )
        if self.max_num_seqs > self.max_num_batched_tokens:
            raise ConfigError(
                f"--max-num-seqs {self.max_num_seqs} is over --max-num-batched-tokens "
                f"{self.max_num_batched_tokens}, and every running request takes a token of a step."
            )

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Self:
        """What keyword arguments or flags ask; names as `a_b_c` or `a-b-c`."""
        return cls(**{"model": None, **canonical(values, PLAN_OPTIONS)})


PLAN_OPTIONS = options_of(PlanAsked)
"""The table that the fields of `PlanAsked` make."""
