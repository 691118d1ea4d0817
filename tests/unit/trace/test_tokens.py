"""Prompts of a trace: as long as their rows say, alike where their ids are, in every process."""

import subprocess
import sys
from hashlib import blake2b

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvspan.errors import ConfigError
from kvspan.trace.row import Trace, TraceRow
from kvspan.trace.tokens import FIRST_TOKEN, TokenSource


def prompts(*rows: TraceRow, block: int = 512, vocab: int = 32000, seed: int = 0) -> list[np.ndarray]:
    source = TokenSource(Trace(rows, block), vocab_size=vocab, seed=seed)
    return [source.prompt(index) for index in range(len(rows))]


def test_a_partial_block_has_exactly_the_tokens_that_are_left() -> None:
    (prompt,) = prompts(TraceRow(0, 6758, 500, tuple(range(14))))
    assert prompt.shape == (6758,)
    assert prompt.dtype == np.int32


def test_equal_ids_are_equal_tokens_and_others_are_not() -> None:
    long, short, other = prompts(
        TraceRow(0, 1300, 1, (7, 8, 9)), TraceRow(1, 1100, 1, (7, 8, 9)), TraceRow(2, 1300, 1, (7, 8, 5))
    )
    assert np.array_equal(long[:1100], short)
    assert np.array_equal(long[:1024], other[:1024])
    assert (long[1024:] == other[1024:]).mean() < 0.05


def test_ids_that_agree_in_32_bits_are_distinct() -> None:
    near, far = prompts(TraceRow(0, 512, 1, (1,)), TraceRow(0, 512, 1, (1 + 2**32,)))
    assert (near == far).mean() < 0.05


def test_what_has_no_id_is_the_rows_own() -> None:
    one, two, none = prompts(TraceRow(0, 900, 1, (3,)), TraceRow(0, 900, 1, (3,)), TraceRow(0, 900, 1))
    assert np.array_equal(one[:512], two[:512])
    assert (one[512:] == two[512:]).mean() < 0.05
    assert (one == none).mean() < 0.05


def test_a_seed_makes_other_prompts() -> None:
    row = TraceRow(0, 512, 1, (1,))
    assert (prompts(row)[0] == prompts(row, seed=1)[0]).mean() < 0.05
    assert np.array_equal(prompts(row, seed=-1)[0], prompts(row, seed=2**64 - 1)[0])


@given(
    length=st.integers(1, 200),
    ids=st.lists(st.integers(0, 2**64 - 1), max_size=25),
    vocab=st.integers(FIRST_TOKEN + 1, 2**31 - 1),
)
def test_tokens_are_in_the_vocabulary(length: int, ids: list[int], vocab: int) -> None:
    (prompt,) = prompts(TraceRow(0, length, 1, tuple(ids[: -(-length // 8)])), block=8, vocab=vocab)
    assert len(prompt) == length
    assert prompt.min() >= FIRST_TOKEN
    assert prompt.max() < vocab


def test_tokens_are_spread_over_the_vocabulary() -> None:
    (prompt,) = prompts(TraceRow(0, 100_000, 1, tuple(range(196))), vocab=FIRST_TOKEN + 100)
    counts = np.bincount(prompt - FIRST_TOKEN, minlength=100)
    assert counts.min() > 850  # 1000 expected, with a standard deviation of 31
    assert counts.max() < 1150


CODE = """
import sys
from kvspan.trace.row import Trace, TraceRow
from kvspan.trace.tokens import TokenSource
rows = (TraceRow(0, 1000, 1, (5, 2**63)), TraceRow(0, 77, 1))
source = TokenSource(Trace(rows), vocab_size=50000, seed=3)
sys.stdout.buffer.write(source.prompt(1).tobytes() + source.prompt(0).tobytes())
"""


def test_every_process_makes_the_same_bytes() -> None:
    def made() -> bytes:
        return subprocess.run([sys.executable, "-c", CODE], check=True, capture_output=True).stdout

    first = made()
    assert made() == first
    assert len(first) == 4 * 1077
    # Published figures name a trace and a seed: the bytes must be those of every version, too.
    assert blake2b(first, digest_size=8).hexdigest() == "5c00b0b77053a722"


def test_a_vocabulary_without_tokens_is_refused() -> None:
    with pytest.raises(ConfigError, match="--vocab-size 16"):
        prompts(TraceRow(0, 1, 1), vocab=FIRST_TOKEN)
