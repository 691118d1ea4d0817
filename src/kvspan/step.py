"""The whole border between deciding (engine, scheduler) and obeying (workers).

One `Step` goes to every rank, the same bytes to each; rank 0's `StepResult` comes back. A worker mirrors
of a request just what it needs: its tokens, its placement and its sampling parameters, all of which
arrive here as increments, so a step's size does not grow with the context.

Everything that crosses a process is a msgspec struct. Knows no tensors.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec
import numpy as np
from numpy.typing import DTypeLike, NDArray

from kvspan.request import SamplingParams


class NewRequest(msgspec.Struct, frozen=True, array_like=True):
    """A request that workers have not seen yet, or have forgotten since it was preempted.

    Args:
        request_id: the engine's number for it.
        tokens: prompt and output so far, int32 little-endian (`pack_tokens`).
        num_prompt_tokens: how many of them are the prompt.
        params: what the sampler needs.
        seed: of the request's random stream; with the position it fixes every draw.
    """

    request_id: int
    tokens: bytes
    num_prompt_tokens: int
    params: SamplingParams
    seed: int


class TokenLog(Protocol):
    """Tokens of a request, in order; it grows at the end. A `list` of ids is one."""

    def __len__(self) -> int:
        """Tokens so far."""
        ...

    def __getitem__(self, index: slice, /) -> list[int]:
        """Some of them."""
        ...

    def append(self, token: int, /) -> None:
        """Puts one more at the end."""
        ...


class CountedTokens:
    """Tokens that nobody knows but for their number, as a trace has them: each counts as token 0.

    Args:
        num_tokens: how many.
    """

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens

    def __len__(self) -> int:
        """Tokens so far."""
        return self._num_tokens

    def __getitem__(self, index: slice, /) -> list[int]:
        """Some of them."""
        return [0] * len(range(*index.indices(self._num_tokens)))

    def __array__(self, dtype: DTypeLike | None = None, *, copy: bool | None = None) -> NDArray[Any]:
        """All of them at once, for `pack_tokens`."""
        return np.zeros(self._num_tokens, dtype)

    def append(self, _token: int, /) -> None:
        """One more, whatever it is."""
        self._num_tokens += 1


def pack_tokens(tokens: Sequence[int] | TokenLog) -> bytes:
    """Token ids as little-endian int32: a 100K-token prompt crosses as 400 KB and one copy."""
    return np.asarray(tokens, dtype="<i4").tobytes()


def unpack_tokens(packed: bytes) -> NDArray[np.int32]:
    """[n] int32: the inverse of `pack_tokens`."""
    return np.frombuffer(packed, dtype="<i4").astype(np.int32)


class Row(msgspec.Struct, frozen=True, array_like=True):
    """Work on one request in one step.

    Args:
        request_id: whose tokens.
        start: position of the first token to compute.
        num_tokens: how many, from `start` on. Their keys are written before they are read.
        sample: whether a token is sampled after the last of them.
        new_tokens: tokens that the worker has not got yet (mostly the last sampled one).
        new_units: units placed since the last step, in order, each `pool * blocks_per_pool + block`.
        allowed: the tokens that may be sampled, a bit for each of the vocabulary, the lowest bit of a
            byte first; empty = all.
    """

    request_id: int
    start: int
    num_tokens: int
    sample: bool
    new_tokens: tuple[int, ...] = ()
    new_units: tuple[int, ...] = ()
    allowed: bytes = b""


class Step(msgspec.Struct, frozen=True, array_like=True):
    """What every rank does next, the same for all.

    Args:
        step_id: counts up; the result carries it back.
        new: requests to learn before `rows` are worked on.
        rows: the work, in the order of the batch.
        ended: requests to forget (finished, aborted or preempted), before `new`.
    """

    step_id: int
    new: tuple[NewRequest, ...]
    rows: tuple[Row, ...]
    ended: tuple[int, ...]


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """A token with its log-probability (natural log, before temperature and penalties).

    Args:
        token_id: the token.
        logprob: its log-probability; may be -inf.
        rank: its place in the vocabulary by probability, the most probable being 1.
    """

    token_id: int
    logprob: float
    rank: int


class Sampled(msgspec.Struct, frozen=True, array_like=True):
    """What one row of a step gave.

    Args:
        request_id: whose it is.
        token_id: the sampled token, or None for a row that does not sample.
        logprobs: the sampled token first, then the `params.logprobs` most probable ones; empty if
            none were asked for.
        prompt_logprobs: one entry for each prompt position that this row predicted, the prompt's
            token first, then the `params.prompt_logprobs` most probable ones.
        failure: a sentence, if nothing can come of the request: it ends with that. Empty = go on.
    """

    request_id: int
    token_id: int | None
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[tuple[TokenLogprob, ...], ...] = ()
    failure: str = ""


class StepResult(msgspec.Struct, frozen=True, array_like=True):
    """What a step gave, one entry a row, in the order of its rows."""

    step_id: int
    rows: tuple[Sampled, ...]


class Fill(msgspec.Struct, frozen=True, array_like=True):
    """Keys and values for units that nobody computes: made up, so that decoding can be measured alone.

    Args:
        units: in order, each `pool * blocks_per_pool + block`.
        num_tokens: tokens from their beginning on that get keys and values.
        seed: fixes them; with the layer, the head and the position, and with nothing of the layout.
    """

    units: tuple[int, ...]
    num_tokens: int
    seed: int


class TimedSpan(msgspec.Struct, frozen=True, array_like=True):
    """A stretch of a rank's time.

    Args:
        name: what it was spent on.
        start_s: by the machine's monotonic clock, the same for all processes of a host.
        stop_s: likewise.
        own_s: its length without the spans inside it.
        group: of a collective: the ranks that made it, e.g. "tp"; else empty.
        op: of a collective: which, e.g. "all_reduce"; else empty.
        sent_bytes: of a collective: that the rank sent, round a ring where there is a choice.
    """

    name: str
    start_s: float
    stop_s: float
    own_s: float
    group: str = ""
    op: str = ""
    sent_bytes: int = 0


class RankReport(msgspec.Struct, frozen=True, array_like=True):
    """What a rank tells once its weights are loaded, so that the cache can be sized.

    Args:
        rank: who tells.
        weight_bytes: bytes of weights that it holds.
        free_bytes: bytes of its device that are free now.
        kv_bytes_per_token: bytes it stores for one token of its own shard, over all layers.
    """

    rank: int
    weight_bytes: int
    free_bytes: int
    kv_bytes_per_token: int


class Executor(Protocol):
    """Ranks that obey. One step is under way at most; `submit` and `collect` alternate."""

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        ...

    def start(self) -> Sequence[RankReport]:
        """Starts the ranks and loads the weights.

        Returns:
            One report a rank, in order of rank.
        """
        ...

    def allocate_cache(self, num_blocks: int) -> None:
        """Makes every rank allocate its KV cache.

        Args:
            num_blocks: blocks of each rank's pool.
        """
        ...

    def submit(self, step: Step) -> None:
        """Sends a step to every rank and returns at once."""
        ...

    def collect(self) -> StepResult:
        """Waits for the step under way.

        Raises:
            EngineDeadError: a rank died, hung or failed. All ranks have been ended.
        """
        ...

    def shutdown(self) -> None:
        """Ends all ranks; a second call does nothing."""
        ...


class MeasuredExecutor(Executor, Protocol):
    """An executor that can be measured as well as used. What is asked comes between two steps."""

    def probe(self) -> None:
        """Looks whether all ranks are there, and waits for nothing.

        Raises:
            EngineDeadError: a rank has ended since the last step. All ranks have been ended.
        """
        ...

    def fill(self, fill: Fill) -> None:
        """Makes every rank write keys and values that it makes up.

        Raises:
            EngineDeadError: a rank died or failed.
        """
        ...

    def watch(self, on: bool) -> list[list[TimedSpan]]:
        """Makes ranks that were started watched note their time, or no longer.

        Returns:
            For each rank what it noted since the last call, in order of their ends.

        Raises:
            EngineDeadError: a rank died or failed.
        """
        ...
