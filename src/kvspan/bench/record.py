"""What was observed of a replay: of each request, and of the engine from moment to moment. Only values.

All times are seconds from the start of the run.
"""

import msgspec
import numpy as np


class Record(msgspec.Struct, kw_only=True):
    """One request; it is filled in while answers come.

    Args:
        index: of its row in the trace.
        input_tokens: of its prompt.
        due_s: when the schedule wanted it sent.
        sent_s: when it was.
        arrivals_s: when each piece of its answer came.
        piece_tokens: tokens of each piece.
        cached_tokens: of its prompt that were found in the cache; None = nobody said.
        end_s: when its answer was whole; None = it was not, when the run ended.
        error: why there is no answer, a sentence.
    """

    index: int
    input_tokens: int
    due_s: float
    sent_s: float
    arrivals_s: list[float] = []
    piece_tokens: list[int] = []
    cached_tokens: int | None = None
    end_s: float | None = None
    error: str | None = None

    @property
    def output_tokens(self) -> int:
        """Tokens that came."""
        return sum(self.piece_tokens)

    @property
    def ok(self) -> bool:
        """Whether its answer is whole."""
        return self.end_s is not None and self.error is None

    @property
    def ttft_s(self) -> float | None:
        """From sending to the first token; None = there was none."""
        return self.arrivals_s[0] - self.sent_s if self.arrivals_s else None

    @property
    def tpot_s(self) -> float | None:
        """Mean time of a token after the first piece; None = there was no more than that."""
        later = self.output_tokens - self.piece_tokens[0] if self.piece_tokens else 0
        return (self.arrivals_s[-1] - self.arrivals_s[0]) / later if later else None

    @property
    def e2e_s(self) -> float | None:
        """From sending to the end of the answer."""
        return self.end_s - self.sent_s if self.ok and self.end_s is not None else None

    def add(self, now_s: float, num_tokens: int) -> None:
        """A piece of its answer has come."""
        self.arrivals_s.append(now_s)
        self.piece_tokens.append(num_tokens)

    def set_output_tokens(self, num_tokens: int) -> None:
        """Corrects what pieces hold, once the server has told how many tokens they are together."""
        if self.piece_tokens and num_tokens != self.output_tokens:
            ends = np.linspace(0, num_tokens, len(self.piece_tokens) + 1).round().astype(int)
            self.piece_tokens = np.diff(ends).tolist()


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """The engine for a moment: a step of our own, or the time between two looks at a server's metrics.

    Args:
        start_s: when it began.
        lasts_s: how long it took.
        running: requests that were computed.
        kv_used: share of the KV cache that requests held, 0..1; None = nobody said.
        prefill_tokens: tokens of prompts that were computed; None = nobody said.
        output_tokens: tokens that were sampled; None = nobody said.
        exchanged: whether it had rows of requests that lie on several ranks; None = nobody said.
    """

    start_s: float
    lasts_s: float
    running: int
    kv_used: float | None = None
    prefill_tokens: int | None = None
    output_tokens: int | None = None
    exchanged: bool | None = None


class Observed(msgspec.Struct, kw_only=True):
    """A run.

    Args:
        records: of every request that was sent, in order of sending.
        samples: of the engine, in order; empty = it does not tell.
        preemptions: in the run; None = nobody said.
        filled_s: when as many requests had ended as there are users; None = never, or it has no users.
        drained_s: when fewer requests were left than users, or none; None = that was not reached.
        started_s: what the clock said at the start of the run.
        end_s: when the run ended.
        interrupted: whether somebody ended it early.
    """

    records: list[Record] = []
    samples: list[Sample] = []
    preemptions: int | None = None
    filled_s: float | None = None
    drained_s: float | None = None
    started_s: float = 0.0
    end_s: float = 0.0
    interrupted: bool = False
