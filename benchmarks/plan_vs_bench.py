"""The planner's step times beside those that `kvspan bench decode` measures on this host.

    python benchmarks/plan_vs_bench.py

Calibrates the host (`kvspan plan calibrate`), then measures case by case (`kvspan bench decode`, one
layout, context and batch at a time) and predicts the same steps. Memory of a shared host is fast in one
minute and slow in the next, so before and after each case the kernels alone are measured again
(`kvspan.bench.probe`: made-up weights and keys), and the case is predicted with that. If the two differ
by more than a fifth, the memory was another one meanwhile, and the case is measured again, at most
twice. Nothing that is predicted from has seen the steps that it is compared with.

Prints both, what is off and the worst, and how many are within `--bound`. `--facts` takes what an
earlier calibration wrote. Exits with 1 if fewer than `--least` are.
"""

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from kvspan.bench.calibrate import at_the_moment
from kvspan.bench.probe import Probe, probe
from kvspan.cli.flags import FlagParser, add_engine_flags, engine_config
from kvspan.config.resolved import Resolved
from kvspan.config.sizes import KV_DTYPE_BYTES
from kvspan.cost.deployment import Deployment
from kvspan.cost.facts import Device, find_device, load_devices
from kvspan.cost.steptime import StepCost
from kvspan.cost.weights import WeightDtypes
from kvspan.cost.work import decode_work
from kvspan.engine.build import resolve_engine

LAYOUTS = (
    "-tp 1",
    "-tp 2 -dcp 2",
    "-tp 2 -dcp 2 --dcp-q-replicate off --dcp-comm-backend ag_rs",
    "-pcp 2 -dcp 2",
)
NAME = "this-host"
TRIES = 3
RESTLESS = 0.2
"""Of the rate at which weights are read: by so much it may change while a case is measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """A case as it was measured, and as it is predicted.

    Args:
        measured: what `kvspan bench decode` found.
        probes: kernels alone, before and after.
        parts_ms: predicted, by what it goes to.
    """

    measured: dict[str, Any]
    probes: Sequence[Probe]
    parts_ms: dict[str, float]

    @property
    def predicted_ms(self) -> float:
        """Of a step."""
        return sum(self.parts_ms.values())

    @property
    def off(self) -> float:
        """What is predicted too much, as a share of what was measured."""
        return self.predicted_ms / float(self.measured["median_ms"]) - 1


def main() -> int:
    """Measures, predicts and prints."""
    asked = _arguments()
    with tempfile.TemporaryDirectory() as directory:
        facts = asked.facts
        if facts is None:
            facts = Path(directory, "host.toml")
            ranks = ("--ranks", str(asked.ranks), "--name", NAME, "--write", str(facts))
            _kvspan("plan", "calibrate", *ranks)
        device = find_device(NAME, load_devices([facts]))
        compared = [each for layout in asked.layout or LAYOUTS for each in _cases(asked, layout, device)]
    Console(width=140).print(_table(asked.model, compared, with_parts=asked.parts))
    inside = sum(abs(each.off) <= asked.bound for each in compared)
    worst = max(abs(each.off) for each in compared)
    print(f"{inside} of {len(compared)} within {asked.bound:.0%}; worst {worst:.0%}")
    least = len(compared) if asked.least is None else asked.least
    return int(inside < least)


def _cases(asked: argparse.Namespace, layout: str, device: Device) -> Iterator[Compared]:
    """The cases of a layout, a probe before, between and after them."""
    resolved = _resolved(asked.model, layout)
    num_ranks = resolved.topology.world_size
    before = probe(num_ranks)
    for context in asked.context.split(","):
        for batch in asked.batch.split(","):
            for _ in range(TRIES):
                measured = _decode(asked, layout, context, batch)
                first, before = before, probe(num_ranks)
                if abs(before.weights_gbs / first.weights_gbs - 1) <= RESTLESS:
                    break
            now = at_the_moment(device, num_ranks=num_ranks, reached=(first, before))
            work = decode_work(measured["context"], batch=measured["batch"])
            parts_s = _step_cost(resolved, now).parts_s(work)
            yield Compared(
                measured=measured,
                probes=(first, before),
                parts_ms={name: seconds * 1e3 for name, seconds in parts_s.items() if seconds},
            )


def _resolved(model: str, layout: str) -> Resolved:
    """What the engine would run for the flags of a layout."""
    parser = FlagParser()
    add_engine_flags(parser)
    asked = engine_config(parser.parse_args(shlex.split(layout)), defaults={"model": model})
    return resolve_engine(asked)[0]


def _step_cost(resolved: Resolved, device: Device) -> StepCost:
    """The same as the planner sees it."""
    return StepCost(
        Deployment(
            model=resolved.model_config,
            device=device,
            topology=resolved.topology,
            dtypes=WeightDtypes(),
            kv_dtype_bytes=KV_DTYPE_BYTES[resolved.kv_dtype],
            exchange=resolved.exchange,
            replicate_q=resolved.replicate_q,
        )
    )


def _decode(asked: argparse.Namespace, layout: str, context: str, batch: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as directory:
        found = Path(directory, "decode.json")
        case = ("--layout", layout, "--context", context, "--batch", batch)
        counts = ("--steps", str(asked.steps), "--rounds", str(asked.rounds), "--json", str(found))
        _kvspan("bench", "decode", asked.model, *case, *counts)
        result: dict[str, Any] = json.loads(found.read_text())["results"][0]
        return result


def _table(model: str, compared: Sequence[Compared], *, with_parts: bool) -> Table:
    table = Table(title=f"A decode step of {model}, in ms", title_justify="left")
    columns = ("layout", "context", "batch", "measured", "rounds", "predicted", "off", "GB/s by turns")
    for name in columns:
        table.add_column(name, justify="left" if name == "layout" else "right")
    for each in compared:
        its = each.measured
        rounds = f"{min(its['round_ms']):.2f}-{max(its['round_ms']):.2f}"
        times = (f"{its['median_ms']:.2f}", rounds, f"{each.predicted_ms:.2f}", f"{each.off:+.0%}")
        memory = ", ".join(f"{reached.weights_gbs:.1f}" for reached in each.probes)
        table.add_row(its["layout"], f"{its['context']:,}", str(its["batch"]), *times, memory)
        if with_parts:
            table.add_row("  " + ", ".join(f"{name} {ms:.2f}" for name, ms in each.parts_ms.items()))
    return table


def _kvspan(*arguments: str) -> None:
    """Runs a command; what it prints goes to stderr."""
    print("kvspan", shlex.join(arguments), file=sys.stderr)
    subprocess.run([sys.executable, "-m", "kvspan", *arguments], check=True, stdout=sys.stderr)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--layout", action="append", help="flags; several times, for several layouts")
    parser.add_argument("--context", default="512,4096")
    parser.add_argument("--batch", default="1,8")
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=2, help="that calibrate measures (2)")
    parser.add_argument("--facts", type=Path, help="what `kvspan plan calibrate` wrote, with this name")
    parser.add_argument("--bound", type=float, default=0.25, help="share by which it may be off (0.25)")
    parser.add_argument("--least", type=int, help="cases that must be within it (all)")
    parser.add_argument("--parts", action="store_true", help="show what each prediction is made of")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
