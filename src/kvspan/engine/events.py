"""What an engine tells of its steps: an event for each row, counters, what it is busy with.

All of it crosses processes. Knows no scheduler.
"""

import msgspec

from kvspan.request import FinishReason
from kvspan.step import TokenLogprob


class Event(msgspec.Struct, frozen=True, array_like=True):
    """What a step gave a request.

    Args:
        request_id: whose it is.
        token_id: the sampled token; None while its prompt is being computed.
        logprobs: of the sampled token and the most probable ones, if asked for.
        prompt_logprobs: of further prompt tokens, if asked for.
        finish_reason: why it ended with this; None = it goes on.
        stop_token: the one of `stop_token_ids` that ended it, if one did.
        num_cached_tokens: tokens of its prompt that were found in the cache.
        num_computed_tokens: tokens whose keys and values are in the cache by now.
        form_ended: whether the token is text and the last one of a form: it ends the request, but is
            no mark of an end.
        failure: a sentence, if the request ended because it cannot go on.
    """

    request_id: int
    token_id: int | None
    logprobs: tuple[TokenLogprob, ...]
    prompt_logprobs: tuple[tuple[TokenLogprob, ...], ...]
    finish_reason: FinishReason | None
    stop_token: int | None
    num_cached_tokens: int
    num_computed_tokens: int
    form_ended: bool = False
    failure: str = ""


class EngineStats(msgspec.Struct, frozen=True, array_like=True):
    """Counters since the engine started.

    Args:
        steps: steps run.
        prompt_tokens: tokens of admitted prompts.
        cached_tokens: those of them that were found in the cache.
        prefill_tokens: tokens computed in rows that are no decodes: of prompts, and after a preemption.
        output_tokens: tokens sampled.
        preemptions: requests that gave their units back and began again.
        kv_gathers: pieces of prompts whose cached context came to them, as keys and values.
        kv_gather_bytes: that a rank sent for that, over all layers.
        q_gathers: pieces of prompts that went to their cached context, as queries.
        q_gather_bytes: that a rank sent for that, their partial results included.
        exchange_steps: steps in which ranks met in attention: with a row of a request that lies on
            several of them, or a piece of a prompt over cached tokens that was too much for its home.
        shared_steps: steps in which PCP coordinates handed new keys of prompts round.
        team_steps: steps in which they multiplied all rows together, each with a part of the weights.
        spills: requests that left their home before they were long, because it was full.
    """

    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    prefill_tokens: int = 0
    output_tokens: int = 0
    preemptions: int = 0
    kv_gathers: int = 0
    kv_gather_bytes: int = 0
    q_gathers: int = 0
    q_gather_bytes: int = 0
    exchange_steps: int = 0
    shared_steps: int = 0
    team_steps: int = 0
    spills: int = 0


class EngineLoad(msgspec.Struct, frozen=True, array_like=True):
    """What an engine is busy with.

    Args:
        num_running: requests that hold units.
        num_waiting: requests that wait for room.
        used_blocks: for each pool, its blocks that requests hold. A pool is a rank's if the interleave
            is the block size, and the whole DCP group's if it is less.
    """

    num_running: int
    num_waiting: int
    used_blocks: tuple[int, ...]
