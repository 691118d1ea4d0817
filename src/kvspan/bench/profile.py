"""Some steps of a replay in detail: what the engine and each rank did when, as a Chrome trace."""

from collections.abc import Sequence

from kvspan.bench.record import Observed, Sample
from kvspan.report.chrome import Span, chrome_trace
from kvspan.step import MeasuredExecutor, TimedSpan


class StepProfiler:
    """Watches ranks for a number of steps in the middle of a replay. Call `after_step` after each step.

    Args:
        executor: of ranks that were started watched.
        skip: steps before it begins: what runs for the first time takes longer.
        steps: to watch; with 0 it never begins.
    """

    def __init__(self, executor: MeasuredExecutor, *, skip: int, steps: int) -> None:
        self._executor, self._skip, self._steps = executor, skip, steps
        self._spans: list[list[TimedSpan]] = []
        self._watching, self._done = False, steps < 1

    def after_step(self, observed: Observed) -> None:
        """Begins or ends watching, when it is time."""
        num_steps = len(observed.samples)
        if not self._watching and not self._done and num_steps >= self._skip:
            self._executor.watch(True)
            self._watching = True
        elif self._watching and num_steps >= self._skip + self._steps:
            self.stop()

    def stop(self) -> None:
        """Ends watching; a second call does nothing."""
        if self._watching:
            self._spans = self._executor.watch(False)
            self._watching, self._done = False, True

    def trace(self, observed: Observed) -> bytes:
        """The trace file's content: the engine's steps, and below them what each rank did.

        Args:
            observed: the run; nothing is there if it ended before watching began.
        """
        watched = observed.samples[self._skip : self._skip + self._steps]
        ranks = [list(map(_span, spans)) for spans in self._spans]
        engine = _engine_spans(watched, ranks[0], observed.started_s) if ranks else []
        return chrome_trace({"engine": engine} | {f"rank {i}": spans for i, spans in enumerate(ranks)})


def _engine_spans(samples: Sequence[Sample], rank_0: Sequence[Span], started_s: float) -> list[Span]:
    """What the engine's own time in each step went to: before rank 0 begins, and after it has ended."""
    spans = []
    steps = [span for span in rank_0 if span.name == "step"]
    for sample, step in zip(samples, steps, strict=False):
        begin_s, end_s = started_s + sample.start_s, started_s + sample.start_s + sample.lasts_s
        details = {
            "requests": sample.running,
            "prefill tokens": sample.prefill_tokens or 0,
            "output tokens": sample.output_tokens or 0,
        }
        step_end_s = step.start_s + step.lasts_s
        spans.append(Span("schedule", begin_s, step.start_s - begin_s, details))
        spans.append(Span("take in", step_end_s, end_s - step_end_s, {}))
    return spans


def _span(span: TimedSpan) -> Span:
    return Span(span.name, span.start_s, span.stop_s - span.start_s, {"own ms": 1e3 * span.own_s})
