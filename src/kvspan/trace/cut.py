"""Parts of a trace, and traces with shorter rows. Pure functions of rows."""

from dataclasses import dataclass

from kvspan.errors import ConfigError
from kvspan.trace.row import Trace, TraceRow


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """What is kept of a trace.

    Args:
        skip: rows to leave out at the beginning, of those that the limits below let through.
        rows: rows to keep at the most; None = all.
        start_s: rows before it are left out; seconds from the trace's first row.
        end_s: likewise from here on; None = to the end.
        max_input: tokens; rows with longer prompts are left out.
        max_output: tokens; longer outputs are cut to it.
        scale: lengths are divided by it, rounded up; a divisor of the trace's block.
    """

    skip: int = 0
    rows: int | None = None
    start_s: float = 0.0
    end_s: float | None = None
    max_input: int | None = None
    max_output: int | None = None
    scale: int = 1


def cut_trace(trace: Trace, cut: Cut) -> Trace:
    """A part of a trace; timestamps and ids stay what they were.

    Args:
        trace: the whole.
        cut: what to keep, in terms of the whole's own lengths.

    Raises:
        ConfigError: nothing is left, or the scale does not divide the block.
    """
    begin_ms = trace.rows[0].timestamp_ms
    end_s = float("inf") if cut.end_s is None else cut.end_s
    kept = [
        _shorter_output(row, cut.max_output)
        for row in trace.rows
        if cut.start_s <= (row.timestamp_ms - begin_ms) / 1000 < end_s
        and (cut.max_input is None or row.input_length <= cut.max_input)
    ]
    rows = kept[cut.skip :][: cut.rows]
    if not rows:
        raise ConfigError(
            f"Nothing is left of the trace: {len(kept)} of {len(trace.rows)} rows pass "
            f"the limits, and --skip {cut.skip} leaves none of them."
        )
    return scaled(Trace(tuple(rows), trace.block_tokens), scale=cut.scale)


def scaled(trace: Trace, *, scale: int, output_scale: int | None = None) -> Trace:
    """The same trace with shorter rows, which share the same parts of their prompts.

    A prompt keeps its ids: with n tokens in blocks of b, ceil(ceil(n/s) / (b/s)) = ceil(n/b).

    Args:
        trace: rows.
        scale: what input lengths and the block are divided by, rounding lengths up.
        output_scale: likewise for output lengths; None = the same.

    Raises:
        ConfigError: the scale does not divide the block.
    """
    if scale < 1 or trace.block_tokens % scale:
        fits = ", ".join(str(n) for n in range(1, trace.block_tokens + 1) if trace.block_tokens % n == 0)
        raise ConfigError(
            f"--scale {scale} does not divide the trace's blocks of {trace.block_tokens} tokens: it "
            f"can be {fits}."
        )
    shorter = scale if output_scale is None else output_scale
    if shorter < 1:
        raise ConfigError(f"--output-scale {shorter} is too small: 1 or more.")
    rows = (
        TraceRow(
            timestamp_ms=row.timestamp_ms,
            input_length=-(-row.input_length // scale),
            output_length=-(-row.output_length // shorter),
            hash_ids=row.hash_ids,
        )
        for row in trace.rows
    )
    return Trace(tuple(rows), trace.block_tokens // scale, trace.num_skipped, trace.num_unsorted)


def _shorter_output(row: TraceRow, max_output: int | None) -> TraceRow:
    length = row.output_length if max_output is None else min(row.output_length, max_output)
    return TraceRow(row.timestamp_ms, row.input_length, length, row.hash_ids)
