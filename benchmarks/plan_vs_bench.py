"""The planner's step times beside those that `kvspan bench decode` measures on this host.

    python benchmarks/plan_vs_bench.py

Calibrates the host (`kvspan plan calibrate`), measures (`kvspan bench decode`), predicts the same steps
and prints both, what is off and the worst. `--facts` and `--bench` take what an earlier run wrote.
Exits with 1 if a prediction is off by more than `--bound`.
"""

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from kvspan.cli.flags import FlagParser, add_engine_flags, engine_config
from kvspan.config.sizes import KV_DTYPE_BYTES
from kvspan.cost.facts import Device, find_device, load_devices
from kvspan.cost.steptime import Deployment, StepCost
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


def step_cost(model: str, layout: str, device: Device) -> StepCost:
    """What the engine would run for the flags of a layout, as the planner sees it."""
    parser = FlagParser()
    add_engine_flags(parser)
    asked = engine_config(parser.parse_args(shlex.split(layout)), defaults={"model": model})
    resolved, _ = resolve_engine(asked)
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


def main() -> int:
    """Measures what is not given, compares and prints."""
    asked = _arguments()
    with tempfile.TemporaryDirectory() as directory:
        facts, bench = asked.facts, asked.bench
        if facts is None:
            facts = Path(directory, "host.toml")
            ranks = ("--ranks", str(asked.ranks), "--name", NAME, "--write", str(facts))
            _kvspan("plan", "calibrate", *ranks)
        if bench is None:
            bench = Path(directory, "decode.json")
            layouts = [part for layout in asked.layout or LAYOUTS for part in ("--layout", layout)]
            cases = ("--context", asked.context, "--batch", asked.batch)
            counts = ("--steps", str(asked.steps), "--rounds", str(asked.rounds), "--json", str(bench))
            _kvspan("bench", "decode", asked.model, *layouts, *cases, *counts)
        device = find_device(NAME, load_devices([facts]))
        results = json.loads(bench.read_text())["results"]
    costs = {d["layout"]: step_cost(asked.model, d["layout"], device) for d in results}
    table = Table(title=f"A decode step of {asked.model}, in ms", title_justify="left")
    for name in ("layout", "context", "batch", "measured", "rounds", "predicted", "off"):
        table.add_column(name, justify="left" if name == "layout" else "right")
    off = []
    for d in results:
        work, cost = decode_work(d["context"], batch=d["batch"]), costs[d["layout"]]
        predicted_ms = cost.step_s(work) * 1e3
        off.append(predicted_ms / d["median_ms"] - 1)
        rounds = f"{min(d['round_ms']):.2f}-{max(d['round_ms']):.2f}"
        times = (f"{d['median_ms']:.2f}", rounds, f"{predicted_ms:.2f}", f"{off[-1]:+.0%}")
        table.add_row(d["layout"], f"{d['context']:,}", str(d["batch"]), *times)
        if asked.parts:
            parts = {k: f"{s * 1e3:.2f}" for k, s in cost.parts_s(work).items() if s}
            table.add_row("  " + ", ".join(f"{name} {ms}" for name, ms in parts.items()))
    Console(width=130).print(table)
    worst, inside = max(map(abs, off)), sum(abs(each) <= asked.bound for each in off)
    print(f"{inside} of {len(off)} within {asked.bound:.0%}; worst {worst:.0%}")
    return int(worst > asked.bound)


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
    parser.add_argument("--bench", type=Path, help="of `kvspan bench decode --json`")
    parser.add_argument("--bound", type=float, default=0.25, help="share by which it may be off (0.25)")
    parser.add_argument("--parts", action="store_true", help="show what each prediction is made of")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
