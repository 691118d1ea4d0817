"""One request under way: its tokens, how far they are computed, and what workers know of them.

Knows units as numbers. Knows no queue, no budget and no tensors.
"""

from dataclasses import dataclass, field

from kvspan.cache.manager import Allocation
from kvspan.cache.prefix import UnitKeys
from kvspan.request import SamplingParams
from kvspan.step import NewRequest, Row, TokenLog, pack_tokens


@dataclass(slots=True, eq=False, kw_only=True)
class SequenceState:
    """One request in the engine: made by the engine, looked after by the scheduler.

    Args:
        request_id: the engine's number for it, never used again.
        tokens: prompt and output; the scheduler appends what is sampled, and `keys` follow.
        num_prompt_tokens: how many of them are the prompt.
        params: how tokens are chosen.
        seed: of its random stream.
        keys: of its units.
        priority: the lower value goes first; among equals, the lower `request_id`.
    """

    request_id: int
    tokens: TokenLog
    num_prompt_tokens: int
    params: SamplingParams
    seed: int
    keys: UnitKeys
    priority: int = 0

    num_computed_tokens: int = field(default=0, init=False)
    """Tokens whose keys and values are in the cache."""
    num_cached_tokens: int | None = field(default=None, init=False)
    """Tokens that it did not need to compute when it first ran; None = it has not run yet."""
    num_preemptions: int = field(default=0, init=False)
    """Times that it gave its units back and began again."""

    num_scored_tokens: int = field(default=0, init=False)
    """Prompt positions up to which log-probabilities have been handed out."""
    allocation: Allocation | None = field(default=None, init=False)
    """Its units; None = it waits."""
    num_sent_tokens: int = field(default=0, init=False)
    """Tokens that the workers have; 0 = they do not know the request."""
    num_sent_units: int = field(default=0, init=False)
    """Units that the workers have."""

    @property
    def place(self) -> tuple[int, int]:
        """Its place in line."""
        return self.priority, self.request_id

    @property
    def num_left(self) -> int:
        """Tokens to compute before the next one can be sampled."""
        return len(self.tokens) - self.num_computed_tokens

    @property
    def output_tokens(self) -> list[int]:
        """Tokens sampled so far."""
        return self.tokens[self.num_prompt_tokens :]

    def begin_again(self) -> bool:
        """Forgets what is computed and what workers know; whether it had begun."""
        had_begun = self.num_sent_tokens > 0
        self.num_preemptions += had_begun
        self.allocation = None
        self.num_computed_tokens = self.num_sent_tokens = self.num_sent_units = 0
        return had_begun

    def introduction(self) -> NewRequest:
        """Tells the workers of it; from here on they know its tokens."""
        self.num_sent_tokens = len(self.tokens)
        tokens = pack_tokens(self.tokens)
        return NewRequest(self.request_id, tokens, self.num_prompt_tokens, self.params, self.seed)

    def row(self, num_tokens: int) -> Row:
        """Work on it, with the tokens and units that the workers do not have yet.

        Args:
            num_tokens: to compute.
        """
        assert self.allocation is not None, "work on a request that holds no units"
        units = self.allocation.units
        row = Row(
            request_id=self.request_id,
            start=self.num_computed_tokens,
            num_tokens=num_tokens,
            sample=num_tokens == self.num_left,
            new_tokens=tuple(self.tokens[self.num_sent_tokens :]),
            new_units=tuple(units[self.num_sent_units :]),
        )
        self.num_sent_tokens = len(self.tokens)
        self.num_sent_units = len(units)
        return row
