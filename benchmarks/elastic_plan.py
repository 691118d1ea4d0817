"""A span for each request on GPUs that nobody has: replicas, a span for all, and elastic, simulated.

The engine's own loop runs on a clock that the cost model moves, with the facts of `kvspan plan`. The
trace is the profile `mixed` (80% under 2K tokens, 20% over 16K) in a closed loop of users. Of replicas
every layout of tensor parallelism that fits is tried, of a span for all both exchanges and ways of
queries; the best counts, at each number of users. All users are at work for as long as it is counted.

    python benchmarks/elastic_plan.py
    python benchmarks/elastic_plan.py --model DeepSeek-R1 --hardware B200-SXM --gpus 8 --users 128,512
    python benchmarks/elastic_plan.py --users 512 --rows 1536 --output-tokens 1600 --only static,elastic
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.console import Console

from kvspan.clock import VirtualClock
from kvspan.config.engine import EngineConfig
from kvspan.config.sizes import KV_DTYPE_BYTES
from kvspan.cost.choose import Machine, resolve
from kvspan.cost.deployment import Deployment
from kvspan.cost.facts import find_device, load_devices
from kvspan.cost.homes import HomesCost
from kvspan.cost.steptime import StepCost
from kvspan.cost.weights import weight_dtypes
from kvspan.errors import ConfigError
from kvspan.plan.homes import HomeRanks
from kvspan.plan.models import find_model
from kvspan.plan.simulate import Replay, Simulation
from kvspan.report.table import TextTable, number, share
from kvspan.topology import Topology
from kvspan.trace.row import Trace
from kvspan.trace.synth import PROFILES, synthesize

REPLICAS, STATIC, ELASTIC = "replicas", "static", "elastic"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a rival did.

    Args:
        rival: who.
        flags: its layout.
        users: of all its replicas.
        output_tok_s: of all GPUs.
        tpot_ms: mean.
        ttft_s: mean.
        preemptions: of one replica.
        exchange_share: of its steps, those in which ranks met in attention.
    """

    rival: str
    flags: str
    users: int
    output_tok_s: float
    tpot_ms: float
    ttft_s: float
    preemptions: int
    exchange_share: float


class Question:
    """A model on some GPUs, and a trace.

    Args:
        asked: of the command line.
    """

    def __init__(self, asked: argparse.Namespace) -> None:
        self.asked = asked
        self.found = find_model(asked.model)
        self.device = find_device(asked.hardware, load_devices())
        self.dtypes = weight_dtypes(asked.weights_dtype, self.found.raw, self.found.config)
        profile = PROFILES[asked.trace]
        profile = replace(profile, output_mean=asked.output_tokens or profile.output_mean)
        self.trace: Trace = synthesize(profile, num_rows=asked.rows, seed=0)

    def outcomes(self, users: int) -> Iterator[Outcome]:
        """Those of every rival that fits."""
        gpus = self.asked.gpus
        for replicas in (n for n in range(1, gpus + 1) if gpus % n == 0):
            on = self._deployment(Topology(tp_size=gpus // replicas))
            yield from self._tried(REPLICAS, on, {}, users, replicas)
        whole = Topology(tp_size=gpus, dcp_size=gpus)
        for exchange, query in (("a2a", "on"), ("a2a", "off"), ("ag_rs", "off")):
            on = self._deployment(whole, exchange=exchange, replicate_q=query == "on")
            flags = {"dcp_comm_backend": exchange, "dcp_q_replicate": query}
            yield from self._tried(STATIC, on, flags, users, 1)
        flags = {"dcp_mode": "elastic", "dcp_span_threshold": self.asked.threshold}
        yield from self._tried(ELASTIC, self._deployment(whole), flags, users, 1)

    def _deployment(self, topology: Topology, **more: Any) -> Deployment:
        return Deployment(
            model=self.found.config,
            device=self.device,
            topology=topology,
            dtypes=self.dtypes,
            kv_dtype_bytes=KV_DTYPE_BYTES[self.asked.kv_cache_dtype],
            **more,
        )

    def _tried(
        self, rival: str, on: Deployment, flags: dict[str, Any], users: int, replicas: int
    ) -> Iterator[Outcome]:
        """A rival's outcome; nothing if its weights leave no room, or users are too few."""
        if rival not in self.asked.only.split(","):
            return
        t = on.topology
        longest = max(row.input_length + row.output_length for row in self.trace.rows)
        options = {
            "model": self.found.name,
            "device": "cuda",
            "tensor_parallel_size": t.tp_size,
            "decode_context_parallel_size": t.dcp_size,
            "kv_cache_dtype": self.asked.kv_cache_dtype,
            "max_model_len": longest + 1,
            "max_num_seqs": self.asked.max_num_seqs,
            "max_num_batched_tokens": self.asked.max_num_batched_tokens,
            **{name: value for name, value in flags.items() if value is not None},
        }
        machine = Machine(cores=1, num_gpus=self.asked.gpus)
        rows = Trace(self.trace.rows[::replicas], self.trace.block_tokens)
        clock = VirtualClock()
        try:
            resolved = resolve(EngineConfig.from_mapping(options), self.found.config, machine)
            cost = StepCost(on)
            ranks = HomeRanks(HomesCost(on), clock) if resolved.ranks_are_homes else None
            engine = Simulation(resolved, cost, block_tokens=rows.block_tokens, clock=clock, ranks=ranks)
        except ConfigError:
            return
        if users < replicas:
            return
        queue = iter(rows.rows)
        own = users // replicas
        replay = engine.closed_loop([queue] * own, num_requests=len(rows.rows) - own)
        stats = engine.core.stats
        said = " ".join(f"--{name.replace('_', '-')} {flags[name]}" for name in flags if flags[name])
        yield _outcome(
            rival,
            f"{t.flags} {said}".strip() + (f" x {replicas}" if replicas > 1 else ""),
            users,
            replay,
            replicas,
            stats.exchange_steps / stats.steps,
        )


def _outcome(
    rival: str, flags: str, users: int, replay: Replay, replicas: int, exchange_share: float
) -> Outcome:
    served = replay.served
    return Outcome(
        rival=rival,
        flags=flags,
        users=users,
        output_tok_s=replicas * replay.output_tokens / replay.seconds,
        tpot_ms=1e3 * sum(s.tpot_s for s in served) / max(len(served), 1),
        ttft_s=sum(s.first_s - s.asked_s for s in served) / max(len(served), 1),
        preemptions=replay.num_preemptions,
        exchange_share=exchange_share,
    )


def best_of(outcomes: list[Outcome]) -> dict[str, Outcome]:
    """Each rival's best by tokens a second."""
    found: dict[str, Outcome] = {}
    for outcome in sorted(outcomes, key=lambda o: o.output_tok_s):
        found[outcome.rival] = outcome
    return found


def main() -> None:
    """Simulates, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="DeepSeek-R1")
    parser.add_argument("--hardware", default="B200-SXM")
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--weights-dtype", default="auto")
    parser.add_argument("--kv-cache-dtype", default="fp8_e4m3")
    parser.add_argument("--trace", default="mixed", choices=("mixed", "short", "agentic"))
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--output-tokens", type=float, help="mean of a request (that of the trace, 400)")
    parser.add_argument("--only", default="replicas,static,elastic", help="rivals (all)")
    parser.add_argument("--users", default="64,128,256,512")
    parser.add_argument("--threshold", type=int, default=None, help="tokens (auto)")
    parser.add_argument("--max-num-seqs", type=int, default=1024)
    parser.add_argument("--max-num-batched-tokens", type=int, default=8192)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    most_users = max(map(int, asked.users.split(",")))
    if asked.rows < 3 * most_users:
        parser.error(f"--rows {asked.rows} are too few for {most_users} users: {3 * most_users} or more")
    question = Question(asked)
    every: list[Outcome] = []
    rows = []
    for users in map(int, asked.users.split(",")):
        outcomes = list(question.outcomes(users))
        every += outcomes
        best = best_of(outcomes)
        rivals = [best[name].output_tok_s for name in (REPLICAS, STATIC) if name in best]
        for rival, o in best.items():
            ratio = o.output_tok_s / max(rivals) if rivals else None
            cells = (number(o.output_tok_s, 0), number(o.tpot_ms), number(o.ttft_s, 2))
            rows.append((str(users), rival, o.flags, *cells, share(o.exchange_share), number(ratio, 2)))
    columns = (
        "users",
        "rival",
        "layout",
        "tok/s",
        "TPOT, ms",
        "TTFT, s",
        "with exchange",
        "/ best rival",
    )
    console = Console(highlight=False)
    console.width = max(console.width, 170)
    if asked.json:
        print(json.dumps([asdict(outcome) for outcome in every]))
    else:
        title = f"{asked.model}, {asked.gpus} x {asked.hardware}, {asked.trace} trace, simulated"
        console.print(TextTable(title, columns, rows).rich())


if __name__ == "__main__":
    main()
