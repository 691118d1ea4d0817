"""What users got of a run with its tail: whole answers, from the first request to the last answer.

That is how `vllm bench serve` counts. A rival whose long answers come late pays for them here, where the
steady window of `bench.figures` ends when the last request is sent. Pure functions of what was seen.
"""

from dataclasses import dataclass

import msgspec

from kvspan.bench.record import Observed, Record

MOST_TAIL = 0.1
"""Of a run: with a longer tail, figures tell more of the last answers than of the load."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """How long the user of an answer that counts as good may wait.

    Args:
        ttft_s: for the first token; None = any time.
        tpot_s: for a token after it, in the mean; None = any time.
    """

    ttft_s: float | None = None
    tpot_s: float | None = None

    def hold(self, record: Record) -> bool:
        """Whether an answer is whole and came in time; one token has no time of a token."""
        waits = ((record.ttft_s, self.ttft_s), (record.tpot_s, self.tpot_s))
        late = any(bound is not None and (wait or 0.0) > bound for wait, bound in waits)
        return record.ok and not late


class Answered(msgspec.Struct, frozen=True, kw_only=True):
    """Whole answers of a run.

    Args:
        lasts_s: from the first request to the last answer; to the run's end, if that cut answers off.
        output_tokens_per_s: of whole answers, over that time.
        requests_per_s: whole answers, likewise.
        good_requests_per_s: goodput, those of them that came in time (`Bounds`).
        tail_share: of that time, what came after the last request was sent, or after a user found none.
    """

    lasts_s: float
    output_tokens_per_s: float
    requests_per_s: float
    good_requests_per_s: float
    tail_share: float


def answered(observed: Observed, bounds: Bounds) -> Answered:
    """Counts a run.

    Args:
        observed: a run.
        bounds: of goodput.
    """
    whole = [r for r in observed.records if r.ok]
    begin_s = min((r.due_s for r in observed.records), default=0.0)
    cut_off = any(r.end_s is None for r in observed.records)
    last_s = max((r.end_s or 0.0 for r in observed.records), default=begin_s)
    end_s = observed.end_s if cut_off else last_s
    lasts_s = max(end_s - begin_s, 1e-9)
    drained_s = end_s if observed.drained_s is None else observed.drained_s
    return Answered(
        lasts_s=lasts_s,
        output_tokens_per_s=sum(r.output_tokens for r in whole) / lasts_s,
        requests_per_s=len(whole) / lasts_s,
        good_requests_per_s=sum(map(bounds.hold, whole)) / lasts_s,
        tail_share=max(end_s - max(drained_s, begin_s), 0.0) / lasts_s,
    )
