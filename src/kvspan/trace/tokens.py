"""The tokens of a trace's prompts: made up, but where rows share an id they share its tokens.

A token is a function of (seed, id, place in the block), computed and not drawn, so every process and
every order of asking gives the same bytes. Knows no tokenizer.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvspan.errors import ConfigError
from kvspan.trace.row import Trace, block_lengths

FIRST_TOKEN = 16
"""Ids below it are left out: most tokenizers keep padding, begin and end of text there."""

_SHARED, _OWN = 0, 1  # what a stream of tokens belongs to: an id, or a row

# splitmix64: Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014.
_STRIDE: Final = np.uint64(0x9E3779B97F4A7C15)
_MIX_1: Final = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2: Final = np.uint64(0x94D049BB133111EB)


class TokenSource:
    """Makes the prompts of a trace.

    Args:
        trace: the rows.
        vocab_size: tokens are drawn from [FIRST_TOKEN, vocab_size).
        seed: another seed makes other prompts, which share nothing with these.

    Raises:
        ConfigError: the vocabulary is too small.
    """

    def __init__(self, trace: Trace, *, vocab_size: int, seed: int = 0) -> None:
        if vocab_size <= FIRST_TOKEN:
            raise ConfigError(
                f"--vocab-size {vocab_size} is too small: prompts leave out the first {FIRST_TOKEN} ids."
            )
        self._trace = trace
        self._num_ids = np.uint64(vocab_size - FIRST_TOKEN)
        self._seed = seed

    def prompt(self, index: int) -> NDArray[np.int32]:
        """The prompt of a row.

        Args:
            index: of the row in the trace.

        Returns:
            [input_length] int32 token ids.
        """
        row = self._trace.rows[index]
        block = self._trace.block_tokens
        own = row.input_length - sum(block_lengths(row, block))
        lengths = [*block_lengths(row, block), own]
        keys = np.concatenate([self._keys(_SHARED, row.hash_ids), self._keys(_OWN, [index])])
        # uint64 arithmetic wraps, which is what the mix is made of.
        key_of_token = np.repeat(keys, lengths)  # [input_length]
        place = np.concatenate([np.arange(n, dtype=np.uint64) for n in lengths])  # [input_length]
        drawn = _mix(key_of_token + (place + np.uint64(1)) * _STRIDE) % self._num_ids
        return drawn.astype(np.int32) + np.int32(FIRST_TOKEN)

    def _keys(self, owner: int, numbers: Sequence[int]) -> NDArray[np.uint64]:
        """[n] where the streams of some ids begin, or that of what a row has for itself."""
        key = np.array([self._seed % 2**64, owner], dtype=np.uint64)
        root = _mix(_mix(key[:1]) + _STRIDE + key[1:])  # [1]
        return _mix(root ^ np.array(numbers, dtype=np.uint64))


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finalizer of splitmix64: a bijection of 64 bits that scatters them."""
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    return x ^ (x >> np.uint64(31))
