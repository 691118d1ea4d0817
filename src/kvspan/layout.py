"""Where a token lives: pure arithmetic on positions. Knows no tensors, no requests, no ranks' names.

Legend (the letters of the mathematics):
    W  dcp_size     ranks over which a sequence's KV is spread
    B  block_size   tokens of one block on one rank
    I  interleave   consecutive tokens that stay together; divides B
    U  unit_tokens  tokens of one unit of placement

A sequence is cut in **units**, which are allocated, hashed, hit and freed as one. A unit is one block
on each of `unit_span` neighbouring ranks; its tokens are dealt to them round robin in runs of I:

    I = B   span 1, U = B      a block of consecutive tokens on one rank (the default)
    I < B   span W, U = B * W  a virtual block: a share of every run on every rank

    W=2 B=4 I=4    rank 0 | 0 1 2 3 | 8 9 ..   |     W=2 B=4 I=2    rank 0 | 0 1 4 5 | 8 9 ..
                   rank 1 | 4 5 6 7 | 12 ..    |                    rank 1 | 2 3 6 7 | 10 ..

Which ranks a unit lies on is data (see `cache.table`); the closed formulas here are the placement
whose units go round the ranks from rank 0.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvspan.errors import LayoutError

NO_SLOT = -1
"""In a slot mapping: write nothing, because another rank owns the token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheLayout:
    """How blocks and ranks share a sequence.

    Args:
        block_size: B, tokens a block holds on one rank.
        dcp_size: W, ranks that share a sequence.
        interleave: I, tokens dealt to a rank at a time; divides `block_size`.

    Raises:
        LayoutError: if `interleave` does not divide `block_size`.
    """

    block_size: int
    dcp_size: int
    interleave: int

    def __post_init__(self) -> None:
        if min(self.block_size, self.dcp_size, self.interleave) < 1:
            raise LayoutError(
                f"Block size {self.block_size}, interleave {self.interleave} and DCP size "
                f"{self.dcp_size} must all be at least 1.",
                reason="size_below_one",
            )
        if self.block_size % self.interleave:
            divisors = [str(i) for i in range(1, self.block_size + 1) if self.block_size % i == 0]
            raise LayoutError(
                f"--cp-kv-cache-interleave-size {self.interleave} does not divide --block-size "
                f"{self.block_size}: two tokens would share a slot. What fits: {', '.join(divisors)}.",
                reason="interleave_does_not_divide_block",
            )

    @property
    def unit_span(self) -> int:
        """Ranks that a unit lies on."""
        return 1 if self.interleave == self.block_size else self.dcp_size

    @property
    def unit_tokens(self) -> int:
        """U: tokens allocated, hashed, hit and freed together (the hit unit)."""
        return self.block_size * self.unit_span

    @property
    def num_pools(self) -> int:
        """Pools to choose from when a unit is placed: one for each set of `unit_span` ranks."""
        return self.dcp_size // self.unit_span

    def num_units(self, num_tokens: int) -> int:
        """Units that hold `num_tokens` tokens."""
        return -(-num_tokens // self.unit_tokens)


def owner(position: int, *, dcp_size: int, interleave: int) -> int:
    """The DCP rank that owns the token at `position`, when units go round from rank 0."""
    return position // interleave % dcp_size


def slot(
    position: int,
    block_table: Sequence[int],
    *,
    rank: int,
    block_size: int,
    dcp_size: int,
    interleave: int,
) -> int:
    """Where DCP rank `rank` keeps the token at `position`, or `NO_SLOT` if another rank owns it.

    Args:
        position: place of the token in its sequence.
        block_table: the rank's blocks of the sequence, one for each virtual block of B * W tokens.
        rank: the DCP rank that asks.
        block_size: B.
        dcp_size: W.
        interleave: I.
    """
    if owner(position, dcp_size=dcp_size, interleave=interleave) != rank:
        return NO_SLOT
    column, offset = divmod(position, block_size * dcp_size)
    run = offset // (dcp_size * interleave)  # which of the rank's runs inside its block
    return block_table[column] * block_size + run * interleave + offset % interleave


def local_len(global_len: int, *, rank: int, dcp_size: int, interleave: int) -> int:
    """Tokens of a `global_len`-token sequence that live on DCP rank `rank`.

    Tokens are dealt round robin in runs of `interleave`; the sum over ranks is `global_len`.
    As a bound, it is the number of LOCAL keys that a query seeing `global_len` keys may see.
    """
    turns, left = divmod(global_len, dcp_size * interleave)
    return turns * interleave + min(max(left - rank * interleave, 0), interleave)


@dataclass(frozen=True, slots=True)
class Chunk:
    """`length` tokens from `offset` on, of the new tokens of one prefill row."""

    offset: int
    length: int


def zigzag(new_tokens: int, *, pcp_size: int) -> list[list[Chunk]]:
    """Shares a prefill row's new tokens over PCP ranks so that causal work balances.

    The row is cut in 2P chunks of ceil(n / 2P) tokens; rank r takes chunks r and 2P-1-r, that is one
    from the cheap end and one from the dear end of the causal triangle.

    Args:
        new_tokens: n, tokens that the row computes in this step.
        pcp_size: P, ranks to share them.

    Returns:
        For each rank its chunks in ascending order, empty ones dropped.
    """
    size = -(-new_tokens // (2 * pcp_size))

    def chunk(index: int) -> Chunk:
        start = min(index * size, new_tokens)
        return Chunk(start, min(start + size, new_tokens) - start)

    pairs = ((chunk(r), chunk(2 * pcp_size - 1 - r)) for r in range(pcp_size))
    return [[c for c in pair if c.length] for pair in pairs]


def restore_order(new_tokens: int, *, pcp_size: int) -> list[int]:
    """Index that undoes `zigzag`: `gathered[restore_order(n)]` is in token order again.

    `gathered` is the concatenation, rank by rank, of the rows each PCP rank worked on.
    """
    gathered = [
        token
        for chunks in zigzag(new_tokens, pcp_size=pcp_size)
        for c in chunks
        for token in range(c.offset, c.offset + c.length)
    ]
    order = [0] * new_tokens
    for place, token in enumerate(gathered):
        order[token] = place
    return order


def causal_pairs(chunks: Sequence[Chunk]) -> int:
    """(query, key) pairs that causal attention among a row's new tokens computes for `chunks`."""
    return sum(
        c.length * (c.offset + 1) + c.length * (c.length - 1) // 2 for c in chunks
    )  # query at place t of the row sees t + 1 keys
