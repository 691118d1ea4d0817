"""The planner's step times beside those that `kvspan bench decode` measured on this host.

    kvspan plan calibrate --ranks 2 --write host.toml
    kvspan bench decode smollm2-135m --layout '-tp 1' --layout '-tp 2 -dcp 2' \
        --layout '-tp 2 -dcp 2 --dcp-q-replicate off --dcp-comm-backend ag_rs' \
        --context 512,4096 --batch 1,8 --json decode.json
    python benchmarks/plan_vs_bench.py --facts host.toml --bench decode.json --config smollm2-135m

Exits with 1 if a prediction is off by more than `--bound`.
"""

import argparse
import json
import shlex
import sys
from pathlib import Path

from kvspan.config.model import ModelConfig
from kvspan.cost.facts import Device, find_device, load_devices
from kvspan.cost.steptime import Deployment, StepCost, decode_work
from kvspan.cost.weights import WeightDtypes
from kvspan.plan.models import find_model
from kvspan.topology import LayoutMode, Topology, check_layout


def step_cost(layout: str, model: ModelConfig, device: Device) -> StepCost:
    """The layout of a `--layout` flag, with the choices that `auto` makes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("-tp", "--tensor-parallel-size", dest="tp", type=int, default=1)
    parser.add_argument("-dcp", "--decode-context-parallel-size", dest="dcp", type=int, default=1)
    parser.add_argument("--dcp-q-replicate", default="auto")
    parser.add_argument("--dcp-comm-backend", default="auto")
    found, _ = parser.parse_known_args(shlex.split(layout))
    topology = Topology(tp_size=found.tp, dcp_size=found.dcp)
    decoupled = check_layout(topology, model.heads) is LayoutMode.DECOUPLED
    return StepCost(
        Deployment(
            model=model,
            device=device,
            topology=topology,
            dtypes=WeightDtypes(),
            kv_dtype_bytes=2,
            exchange={"auto": "a2a"}.get(found.dcp_comm_backend, found.dcp_comm_backend),
            replicate_q={"on": True, "off": False}.get(found.dcp_q_replicate, decoupled),
        )
    )


def main() -> int:
    """Compares and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--facts", type=Path, required=True, help="what `kvspan plan calibrate` wrote")
    parser.add_argument("--name", default="this-host", help="of the row")
    parser.add_argument("--bench", type=Path, required=True, help="of `kvspan bench decode --json`")
    parser.add_argument("--config", default="smollm2-135m", help="the model, as `kvspan plan` names it")
    parser.add_argument("--bound", type=float, default=0.25, help="share by which it may be off (0.25)")
    parser.add_argument("--parts", action="store_true", help="show what each prediction is made of")
    asked = parser.parse_args()
    device = find_device(asked.name, load_devices([asked.facts]))
    model = find_model(asked.config).config
    worst = 0.0
    print(
        f"{'layout':<60}{'context':>8}{'batch':>6}{'measured':>10}{'predicted':>10}{'off':>7}  ms a step"
    )
    for d in json.loads(asked.bench.read_text())["results"]:
        cost = step_cost(d["layout"], model, device)
        work = decode_work(d["context"], batch=d["batch"])
        predicted_ms = cost.step_s(work) * 1e3
        off = predicted_ms / d["median_ms"] - 1
        worst = max(worst, abs(off))
        figures = f"{d['median_ms']:>10.2f}{predicted_ms:>10.2f}{off:>+7.0%}"
        print(f"{d['layout']:<60}{d['context']:>8}{d['batch']:>6}{figures}")
        if asked.parts:
            parts = {k: f"{s * 1e3:.2f}" for k, s in cost.parts_s(work).items() if s}
            print("   ", ", ".join(f"{name} {ms}" for name, ms in parts.items()))
    print(f"worst: {worst:.0%}, bound {asked.bound:.0%}")
    return int(worst > asked.bound)


if __name__ == "__main__":
    sys.exit(main())
