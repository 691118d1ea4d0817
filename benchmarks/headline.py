"""The headline experiment: what the KV cache of a rank holds decides how far a layout scales.

Two models with dummy weights, one with latent attention (DeepSeek's, one KV head) and one with 2 KV
heads, on 4 ranks with the same KV budget each: plain tensor parallelism, which keeps copies, against
decode context parallelism, which does not. The trace is the agentic profile with prompts 64 times
shorter. Half and double the budget show what the budget does.

    make headline                                  # all of it, 16 minutes on 2 cores; it resumes
    python benchmarks/headline.py --only mla --budgets 1 --output DIRECTORY
"""

import argparse
import json
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvspan.bench.offline import Told
from kvspan.bench.sweep import Layout, Point, SweepPlan, run_sweep
from kvspan.bench.sweep_report import pareto_plot, sweep_csv, sweep_table, users_plots
from kvspan.cli.replay_bar import ReplayBar
from kvspan.cli.startup import stderr_console
from kvspan.config.cores import num_cores
from kvspan.config.engine import EngineConfig
from kvspan.report.page import Code, Heading, Part, Plots, Text, page, write_text
from kvspan.report.plots import save
from kvspan.report.table import TextTable
from kvspan.trace.cut import Cut, cut_trace, scaled
from kvspan.trace.row import Trace
from kvspan.trace.synth import PROFILES, synthesize

RANKS = 4
SCALE, OUTPUT_SCALE = 64, 8
MAX_INPUT = 256 * 1024  # before scaling: half the budget must hold the longest prompt and its output
MAX_OUTPUT = 1024  # before scaling
NUM_ROWS = 4000
MODEL_LEN = MAX_INPUT // SCALE + MAX_OUTPUT // OUTPUT_SCALE

COMMON: dict[str, Any] = {
    "hidden_size": 512,
    "num_hidden_layers": 4,
    "vocab_size": 4096,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 1,
}
MLA = COMMON | {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "q_lora_rank": None,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
    "attention_bias": False,
    "intermediate_size": 2048,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 512,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "topk_method": "greedy",
    "scoring_func": "softmax",
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
}
GQA = COMMON | {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 2048,
    "attention_bias": False,
    "mlp_bias": False,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """One model, its two layouts, and what is asked of them.

    Args:
        name: `mla` or `gqa`.
        title: for readers.
        config: the model's config.json.
        dcp_size: W of the layout that is compared with plain tensor parallelism.
        budget_mib: KV cache of a rank, 12,288 tokens of it.
        users: by share of the budget.
        least: what is asked: how many times plain tensor parallelism's tokens, requests and throughput.
        most_tpot: TPOT at equal users below saturation, how many times it may be; None = not asked.
    """

    name: str
    title: str
    config: Mapping[str, Any]
    dcp_size: int
    budget_mib: float
    users: Mapping[float, Sequence[int]]
    least: Mapping[str, float]
    most_tpot: float | None = None


EXPERIMENTS = (
    Experiment(
        name="mla",
        title="Latent attention (one KV head), -tp 4 against -tp 4 -dcp 4",
        config=MLA,
        dcp_size=4,
        budget_mib=15,
        users={1.0: (2, 4, 8, 12, 16, 32, 48, 64), 0.5: (4, 8, 16, 32), 2.0: (8, 16, 32, 64, 96)},
        least={"KV tokens": 3.9, "requests running": 3.8, "output tok/s per rank": 2.5},
        most_tpot=1.15,
    ),
    Experiment(
        name="gqa",
        title="2 KV heads, -tp 4 against -tp 4 -dcp 2",
        config=GQA,
        dcp_size=2,
        budget_mib=12,
        users={1.0: (4, 8, 16, 24, 32), 0.5: (4, 8, 16), 2.0: (16, 32, 48)},
        least={"KV tokens": 1.95, "output tok/s per rank": 1.4},
    ),
)


def main() -> None:
    """Measures what is missing, and writes the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("docs/results/headline"))
    parser.add_argument("--only", choices=[e.name for e in EXPERIMENTS], help="one model (both)")
    parser.add_argument("--budgets", default="1,0.5,2", help="shares of the budget (1,0.5,2)")
    parser.add_argument("--users", help="instead of those of the experiment, e.g. 8,32")
    parser.add_argument("--duration", type=float, default=8.0, help="seconds of a point (8)")
    parser.add_argument("--per-user", type=float, default=0.4, help="more seconds for each user (0.4)")
    parser.add_argument("--seed", type=int, default=0, help="of the trace (0)")
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    chosen = [e for e in EXPERIMENTS if arguments.only in (None, e.name)]
    trace, parts = make_trace(arguments.seed), []
    for experiment in chosen:
        found = {
            share: measure(experiment, share, trace, arguments)
            for share in map(float, arguments.budgets.split(","))
        }
        parts += report(experiment, found, arguments.output)
    write_page(parts, arguments.output)


def make_trace(seed: int) -> Trace:
    """The agentic trace, scaled."""
    whole = synthesize(PROFILES["agentic"], num_rows=NUM_ROWS, seed=seed)
    kept = cut_trace(whole, Cut(max_input=MAX_INPUT, max_output=MAX_OUTPUT))
    return scaled(kept, scale=SCALE, output_scale=OUTPUT_SCALE)


def measure(
    experiment: Experiment, share: float, trace: Trace, arguments: argparse.Namespace
) -> list[Point]:
    """The points of one model at one budget; those that are on disk are not measured again."""
    users = experiment.users[share] if share in experiment.users else experiment.users[1.0]
    plan = SweepPlan(
        layouts=[
            _layout(experiment, dcp_size, share, arguments.output)
            for dcp_size in (1, experiment.dcp_size)
        ],
        users=users if arguments.users is None else [int(n) for n in arguments.users.split(",")],
        trace=trace,
        scale=SCALE,
        duration_s=arguments.duration,
        duration_per_user_s=arguments.per_user,
    )
    console = stderr_console()

    def begun(name: str, num_users: int) -> Told:
        console.print(f"{experiment.name}, {share:g} x budget, {name}, {num_users} users", style="dim")
        return ReplayBar(console, len(trace.rows)).show

    points = run_sweep(plan, arguments.output / "points.jsonl", begun=begun)
    if len(points) < len(plan.users) * len(plan.layouts):
        raise SystemExit(130)  # after a Ctrl-C; what was measured is on disk
    return points


def _layout(experiment: Experiment, dcp_size: int, share: float, directory: Path) -> Layout:
    model = directory / experiment.name
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps(dict(experiment.config), indent=1) + "\n")
    options: dict[str, Any] = {
        "model": str(model),
        "load_format": "dummy",
        "tensor_parallel_size": RANKS,
        "decode_context_parallel_size": dcp_size,
        "kv_cache_memory": int(share * experiment.budget_mib * 2**20),
        "max_model_len": MODEL_LEN,
        "max_num_seqs": 128,
        "max_num_batched_tokens": 512,
        "num_threads": 1,
    }
    return Layout(f"-tp {RANKS} -dcp {dcp_size}", EngineConfig.from_mapping(options))


def report(experiment: Experiment, found: Mapping[float, list[Point]], directory: Path) -> list[Part]:
    """The part of the page that one model has; its plots and tables are written beside it, too."""
    parts: list[Part] = [Heading(experiment.title)]
    for share, points in found.items():
        label = "at the budget" if share == 1 else f"at {share:g} times the budget"
        if share == 1:
            parts.append(verdict(experiment, points))
        plots = [pareto_plot(points, title=f"{experiment.name} {label}"), *users_plots(points)]
        stem = f"{experiment.name}-{share:g}"
        save(plots[0], directory / f"{stem}-pareto.svg")
        save(plots[1], directory / f"{stem}-throughput.svg")
        write_text(sweep_csv(points), directory / f"{stem}.csv")
        parts += [Plots(plots), sweep_table(points, f"{experiment.title}, {label}")]
    return parts


def verdict(experiment: Experiment, points: Sequence[Point]) -> TextTable:
    """What was asked, and what was found, at the budget itself."""
    plain, spread = (
        [p for p in points if p.layout == f"-tp {RANKS} -dcp {size}"]
        for size in (1, experiment.dcp_size)
    )
    measures = {
        "KV tokens": [run[0].capacity_tokens for run in (plain, spread)],
        "requests running": [max(sustained(p) for p in run) for run in (plain, spread)],
        "output tok/s per rank": [max(p.rank_speed for p in run) for run in (plain, spread)],
    }
    rows = [
        (name, f"{a:,.1f}", f"{b:,.1f}", f"{b / a:.2f}", f"at least {experiment.least.get(name, 0):g}")
        for name, (a, b) in measures.items()
        if a
    ]
    for one, other in zip(plain, spread, strict=True):
        if experiment.most_tpot and one.users <= max(sustained(p) for p in plain) * 0.75:
            a, b = 1000 / one.user_speed, 1000 / other.user_speed
            asked = f"at most {experiment.most_tpot:g}"
            rows.append(
                (f"TPOT with {one.users} users, ms", f"{a:.1f}", f"{b:.1f}", f"{b / a:.2f}", asked)
            )
    columns = ("", "plain", f"-dcp {experiment.dcp_size}", "times", "asked")
    return TextTable("What was asked", columns, rows)


def sustained(point: Point) -> float:
    """Requests that ran at a time, on average, if none had to begin again; else none."""
    return (point.found.engine.running_mean or 0.0) if not point.found.engine.preemptions else 0.0


def write_page(parts: Sequence[Part], directory: Path) -> None:
    """One HTML file with everything, and the tables as Markdown."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    machine = f"{num_cores()} cores of {_processor()}, {RANKS} ranks of one thread each"
    about = (
        f"Prompts of the agentic profile are {SCALE} times shorter (a median of 67K becomes 1,072 "
        f"tokens) and those over {MAX_INPUT // 1024}K are left out; outputs are {OUTPUT_SCALE} times "
        f"shorter (about 50 tokens). Commit {commit}; {machine}."
    )
    title = "Headline: a KV cache that spans ranks"
    whole: list[Part] = [Code("make headline"), Text(about), *parts]
    write_text(page(title, whole), directory / "headline.html")
    write_text(f"# {title}\n\n`make headline`\n\n{about}\n" + "".join(map(_markdown, parts)),
               directory / "headline.md")  # fmt: skip


def _markdown(part: Part) -> str:
    match part:
        case Heading(text):
            return f"\n## {text}\n"
        case Text(text):
            return f"\n{text}\n"
        case TextTable(title, columns, rows):
            lines = [columns, ["---"] * len(columns), *rows]
            table = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
            return f"\n**{title}**\n\n{table}\n"
        case _:
            return ""


def _processor() -> str:
    names = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return names[0] if names else platform.machine()


if __name__ == "__main__":
    main()
