"""A trace is rows: when a request came, how long it was, and which parts of its prompt others shared.

Knows no file format and no tokens. The prompt of a row is cut into hash blocks of `block_tokens` tokens
(512 in the public traces); these are the trace's own and have nothing to do with blocks of a KV cache.
"""

from dataclasses import dataclass

import msgspec

BLOCK_TOKENS = 512
"""Tokens that an id stands for in the public traces: Mooncake, FAST'25 release."""


class TraceRow(msgspec.Struct, frozen=True):
    """A request as it was observed.

    Args:
        timestamp_ms: when it came, from an arbitrary start.
        input_length: tokens of its prompt, at least 1.
        output_length: tokens that it got, at least 1.
        hash_ids: of its prompt's blocks, in order, each in [0, 2^64). An id stands for what its block
            holds and for all that comes before it: where two rows have the same id, they begin alike.
            There may be fewer ids than blocks; the tokens after them are the row's own.
    """

    timestamp_ms: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Trace:
    """Rows in order of time.

    Args:
        rows: the requests.
        block_tokens: tokens that an id stands for; the last block of a prompt may hold fewer.
        num_skipped: bad lines that were left out.
        num_unsorted: rows that came before their predecessor in the file.
    """

    rows: tuple[TraceRow, ...]
    block_tokens: int = BLOCK_TOKENS
    num_skipped: int = 0
    num_unsorted: int = 0


def num_blocks(input_length: int, block_tokens: int) -> int:
    """Hash blocks of a prompt, the last perhaps partial.

    Args:
        input_length: tokens of the prompt.
        block_tokens: tokens of a block.
    """
    return -(-input_length // block_tokens)


def block_lengths(row: TraceRow, block_tokens: int) -> list[int]:
    """Tokens of each block that has an id: all whole, but for the last of a prompt.

    Args:
        row: a request.
        block_tokens: tokens of a whole block.
    """
    return [
        min(block_tokens, row.input_length - index * block_tokens) for index in range(len(row.hash_ids))
    ]
