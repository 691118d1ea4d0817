"""`kvspan check`: does a layout give what one rank gives, on this model and this machine?"""

import argparse

from rich.console import Console
from rich.table import Table

from kvspan.check.compare import FP32_BOUND, NARROW_FACTOR, Exact, Narrow
from kvspan.check.run import Stage, Verdict, check
from kvspan.cli.flags import add_engine_flags, engine_config
from kvspan.cli.json_flag import JsonOutput, add_json_flag
from kvspan.cli.startup import stderr_console
from kvspan.clock import Clock, WallClock


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    add_json_flag(parser)
    add_engine_flags(parser, positional_model=True)


def run(arguments: argparse.Namespace) -> int:
    """Runs the command: exit code 0 if the layout agrees with one rank, 1 if not."""
    json = JsonOutput(arguments)
    config = engine_config(arguments)
    course = _Course(stderr_console(), WallClock())
    verdict = check(config, told=course.tell, use_tqdm=True)
    course.tell_end()
    json.write(_plain(verdict))
    _print(Console(highlight=False, quiet=json.is_alone), verdict)
    return 0 if verdict.holds else 1


class _Course:
    """Says on a console what runs, since when, and for about how long.

    Args:
        console: that somebody watches.
        clock: for durations.
    """

    def __init__(self, console: Console, clock: Clock) -> None:
        self._console, self._clock = console, clock
        self._begun_s = clock.now_s()

    def tell(self, stage: Stage) -> None:
        """What is about to run."""
        doing = "loading" if stage.num_prompts is None else f"computing {stage.num_prompts} prompts"
        self._say(f"run {stage.run} of {stage.num_runs}, {stage.what}: {doing}", self._times(stage))

    def tell_end(self) -> None:
        """That nothing runs any more."""
        self._say("compared", f"{self._past_s:.0f} s in all")

    @property
    def _past_s(self) -> float:
        return self._clock.now_s() - self._begun_s

    def _times(self, stage: Stage) -> str:
        """Runs take about as long as one another, so those that are done tell of those that are not."""
        done = stage.run - 1
        if not done or stage.num_prompts is not None:
            return f"{self._past_s:.0f} s so far"
        left_s = self._past_s / done * (stage.num_runs - done)
        return f"{self._past_s:.0f} s so far, about {left_s:.0f} s to go"

    def _say(self, what: str, when: str) -> None:
        self._console.print(f"{what} ({when})", style="dim", markup=False)


def _print(console: Console, verdict: Verdict) -> None:
    layout = verdict.layout
    lengths = ", ".join(map(str, dict.fromkeys(verdict.prompt_lengths)))
    console.print(
        f"{layout.model}: {layout.topology.flags}, interleave {layout.interleave}, "
        f"{layout.exchange}, queries {'replicated' if layout.replicate_q else 'gathered'}, beside one "
        f"rank; {len(verdict.prompt_lengths)} prompts of {lengths} tokens.",
        markup=False,
    )
    console.print(_exact_table(verdict.exact))
    if verdict.narrow:
        console.print(_narrow_table(verdict.narrow, layout.dtype))
    word, hint = ("equal", "") if verdict.holds else ("NOT equal", "; see the lines that are BEYOND")
    console.print(f"{word}: {layout.topology.flags} and one rank{hint}", markup=False)


def _exact_table(runs: tuple[Exact, ...]) -> Table:
    table = Table(
        "float32",
        "output tokens",
        "different",
        "worst difference",
        "",
        title=f"Tokens equal, log-probabilities within {FP32_BOUND:g}",
        title_justify="left",
    )
    for run in runs:
        table.add_row(
            run.name, f"{run.num_tokens}", f"{run.different}", f"{run.worst:.1e}", _word(run.holds)
        )
    return table


def _narrow_table(runs: tuple[Narrow, ...], dtype: str) -> Table:
    table = Table(
        f"{dtype}\n(one rank / layout)",
        "positions",
        "median",
        "p99",
        "flips",
        "",
        title=f"Distance to float32, on its tokens: at most {NARROW_FACTOR} times one rank's",
        title_justify="left",
        caption="flips: another token is most probable, though float32's leads by over one rank's p99: "
        "rare, so the layout's may exceed one rank's by three standard deviations (9 beside 0).",
        caption_justify="left",
    )
    for run in runs:
        near, far = run.one_rank, run.layout
        table.add_row(
            run.name,
            f"{far.num_positions}",
            f"{near.median:.4f} / {far.median:.4f}",
            f"{near.p99:.4f} / {far.p99:.4f}",
            f"{run.one_rank_flips} / {run.layout_flips}",
            _word(run.holds),
        )
    return table


def _word(holds: bool) -> str:
    return "ok" if holds else "BEYOND"


def _plain(verdict: Verdict) -> dict[str, object]:
    return {
        "model": verdict.layout.model,
        "tensor_parallel_size": verdict.layout.tp_size,
        "decode_context_parallel_size": verdict.layout.dcp_size,
        "prefill_context_parallel_size": verdict.layout.pcp_size,
        "prompt_lengths": verdict.prompt_lengths,
        "dtype": verdict.layout.dtype,
        "kv_dtype": verdict.layout.kv_dtype,
        "exact": verdict.exact,
        "narrow": verdict.narrow,
        "equal": verdict.holds,
    }
