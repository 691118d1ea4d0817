"""Nonsense on the command line ends in one sentence and exit 2, before anything runs."""

from itertools import pairwise
from pathlib import Path

import pytest

from kvspan.cli.main import main
from kvspan.config.engine import ENGINE_OPTIONS
from kvspan.config.options import Option
from kvspan.config.server import SERVER_OPTIONS
from kvspan.testing.checkpoints import write_checkpoint, write_tokenizer
from kvspan.testing.tiny import TINY

DECODE, ELASTIC = ["bench", "decode", "nowhere"], ["bench", "elastic", "nowhere"]
SWEEP = ["bench", "sweep", "nowhere", "--trace", "nothing"]
REPLAY = ["bench", "serve", "nowhere", "--trace", "nothing"]
CUT, STATS = ["trace", "cut", "nothing"], ["trace", "stats", "nothing"]


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ([*DECODE, "--layout", '-tp "2'], '--layout -tp "2 cannot be read: no closing quotation.'),
        ([*ELASTIC, "--layout", "-tp '2"], "--layout -tp '2 cannot be read: no closing quotation."),
        ([*DECODE, "--layout", "-tp"], "(see `kvspan bench decode --help`)"),
        ([*DECODE, "--cases", "64"], "--cases 64 is no list of CONTEXT:BATCH"),
        ([*DECODE, "--cases", "64:1:2"], "--cases 64:1:2 is no list of CONTEXT:BATCH"),
        ([*ELASTIC, "--scale", "0"], "--scale 0 is too small: 1 or more."),
        ([*ELASTIC, "--output-scale", "-1"], "--output-scale -1 is too small: 1 or more."),
        ([*ELASTIC, "--context", "0", "--trace", "none"], "--trace none leave nothing to measure"),
        ([*DECODE, "--json", "/no/x.json"], "/no/x.json cannot be written: there is no directory /no."),
        ([*ELASTIC, "--svg", "/no/x.svg"], "/no/x.svg cannot be written: there is no directory /no."),
        (["bench", "serve", "m", "--trace", "t", "--csv", "/no/x"], "there is no directory /no."),
        (["plan", "calibrate", "--write", "/no/x.toml"], "there is no directory /no."),
        (["check", "nowhere", "-dp", "2"], "--data-parallel-size 2: replicas stand behind a server"),
        ([*DECODE, "-dp", "2"], "--data-parallel-size 2: replicas stand behind a server"),
        ([*DECODE, "--layout", "-dp 2"], "--data-parallel-size 2: replicas stand behind a server"),
        ([*ELASTIC, "--layout", "-dp 2"], "--data-parallel-size 2: replicas stand behind a server"),
        (["bench", "sweep", "nowhere"], "(see `kvspan bench sweep --help`)"),
        (["generate", "nowhere", "--prompt", "x", "--chat", "--chat-template", "no"], "template no"),
        (["serve", "nowhere", "--chat-template", "no"], "--chat-template no cannot be read"),
        (["trace", "stats"], "(see `kvspan trace stats --help`)"),
        (["plan", "kimi-k2.6", "--hardware", "nonsense"], "there are A100-SXM, H100-SXM"),
        ([*DECODE, "--steps", "x"], "--steps x is not a whole number"),
        ([*ELASTIC, "--duration", "x"], "--duration x is not a number"),
        (["generate", "m", "--prompt", "x", "--max-tokens", "1e3"], "--max-tokens 1e3 is not a whole"),
        (
            [*DECODE, "--context", "1e9"],
            "1e9 is not a number such as 4096, or one with a unit",
        ),
        ([*ELASTIC, "--trace-seed", "-1"], "--trace-seed -1 is too small: 0 or more."),
        ([*ELASTIC, "--svg", "x.pdf"], "A plot is .svg or .png, not x.pdf."),
        ([*SWEEP, "--scale", "0"], "--scale 0 is too small: 1 or more."),
        ([*SWEEP, "--duration", "nan"], "--duration nan must be more than 0 seconds."),
        ([*REPLAY, "--scale", "0"], "--scale 0 is too small: 1 or more."),
        ([*REPLAY, "--concurrency", "0"], "--concurrency 0 is too small: 1 or more."),
        ([*REPLAY, "--speed-up", "nan"], "--speed-up nan must be more than 0 times"),
        ([*REPLAY, "--duration", "nan"], "--duration nan must be more than 0 seconds."),
        ([*REPLAY, "--vocab-size", "0"], "--vocab-size 0 is too small: 17 or more."),
        ([*STATS, "--hit-unit", "0"], "--hit-unit 0 is too small: 1 or more."),
        ([*CUT, "--skip", "-1"], "--skip -1 is too small: 0 or more."),
        ([*CUT, "--rows", "0"], "--rows 0 is too small: 1 or more."),
        ([*CUT, "--start", "nan"], "--start nan is too small: 0 or more."),
        ([*CUT, "--max-output", "0"], "--max-output 0 is too small: 1 or more."),
        (["trace", "synth", "--seed", "-1"], "--seed -1 is too small: 0 or more."),
        (
            ["plan", "kimi-k2.6", "--hardware", "H100-SXM", "--facts", "/no"],
            "/no cannot be read: No such",
        ),
        (["generate", "m", "--prompt-file", "/"], "--prompt-file / cannot be read: Is a directory."),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_nonsense_is_refused(line: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(line) == 2
    assert told in capsys.readouterr().err


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a model, its tokenizer, and a trace."""
    made = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(made, TINY["llama-gqa"], seed=5)
    write_tokenizer(made, vocab_size=203)
    assert main(["trace", "synth", "--rows", "2", "--output", str(made / "trace.jsonl")]) == 0
    return made


SERVE = ["serve", "{model}", "--port", "0"]
GENERATE = ["generate", "{model}", "--prompt", "x"]
PLAN = ["plan", "kimi-k2.6", "--hardware", "H100-SXM", "--trace", "{model}/trace.jsonl"]


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ([*SERVE, "--host", "256.0.0.1"], "Give an address of this machine: 127.0.0.1"),
        ([*SERVE, "--host", "192.0.2.1"], "Give an address of this machine: 127.0.0.1"),
        ([*GENERATE, "--tokenizer", "/no/where"], '--tokenizer: No model "/no/where"'),
        (["generate", "{model}/trace.jsonl", "--prompt", "x"], "model is the directory that its config"),
        ([*PLAN, "--block-size", "x"], "--block-size x is not a multiple of 8"),
        (
            ["bench", "serve", "--url", "http://localhost:99999", "--trace", "{model}/trace.jsonl"],
            "port must be 0-65535. A server that runs is meant, like http://localhost:8000.",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_nonsense_beside_a_model_is_refused(
    line: list[str], told: str, directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([text.replace("{model}", str(directory)) for text in line]) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("file", "content", "told"),
    [
        ("config.json", None, "has no config.json: take the file from where the weights come from."),
        ("config.json", b"{", "config.json cannot be read as JSON"),
        ("config.json", b"[]", "config.json must hold a JSON object, and holds a list."),
        ("config.json", b"{}", '"architectures" must name one class'),
        ("model.safetensors", None, "has no weights: neither model.safetensors"),
        ("model.safetensors", b"", "is cut off: it has 0 bytes. Download it again."),
        ("model.safetensors", b"\xff" * 99, "is cut off: it has 99 bytes. Download it again."),
        ("tokenizer.json", b"{", "tokenizer.json is no tokenizer: EOF"),
        ("tokenizer.json", None, "or name one with --tokenizer."),
    ],
    ids=lambda value: "" if isinstance(value, str) and " " in value else f"{value!r:.20}",
)
def test_a_broken_checkpoint_is_refused(
    file: str, content: bytes | None, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_checkpoint(tmp_path, TINY["llama-gqa"], seed=5)
    write_tokenizer(tmp_path, vocab_size=203)
    (tmp_path / file).unlink()
    if content is not None:
        (tmp_path / file).write_bytes(content)
    small = ["--kv-cache-memory", "8MiB", "--num-threads", "1"]
    assert main(["generate", str(tmp_path), "--prompt", "x", "--max-tokens", "1", *small]) == 2
    assert told in " ".join(capsys.readouterr().err.split())


def test_a_checkpoint_that_is_cut_off_tells_both_sizes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_checkpoint(tmp_path, TINY["llama-gqa"], seed=5)
    weights = tmp_path / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1000])
    small = ["--kv-cache-memory", "8MiB", "--num-threads", "1"]
    assert main(["generate", str(tmp_path), "--prompt", "x", *small]) == 2
    told = f"has {len(whole) - 1000} bytes, and its header says {len(whole)}: download it again."
    assert told in capsys.readouterr().err


@pytest.mark.parametrize("table", [ENGINE_OPTIONS, SERVER_OPTIONS], ids=["engine", "server"])
def test_each_heading_of_the_help_stands_once(table: tuple[Option, ...]) -> None:
    groups = [option.group for option in table]
    changes = [a for a, b in pairwise(groups) if a != b] + groups[-1:]
    assert len(changes) == len(set(changes))


@pytest.mark.parametrize(
    ("typed", "instead"),
    [
        ("-pp 2", "there are no pipeline stages: use --tensor-parallel-size"),
        ("--enable-eplb", "use --enable-expert-parallel"),
        ("--headless", "leave it out"),
        ("--prefix-caching-hash-algo sha256", "leave it out"),
        ("--override-generation-config {}", "with --generation-config"),
        ("--enable-dbo", "leave it out"),
        ("--all2all-backend naive", "leave it out"),
        ("--kv-offloading-size 8", "raise --kv-cache-memory"),
        ("--structured-outputs-config {}", "leave it out"),
        ("-O3", "nothing is compiled"),
        ("-O.level=3", "nothing is compiled"),
        ("-q awq", "it is read from the checkpoint"),
        ("-dpl 2", "use --data-parallel-size"),
        ("--tp-size 2", "use --tensor-parallel-size"),
        ("--tp 2", "use --tensor-parallel-size"),
        ("--dp-size 2", "use --data-parallel-size"),
        ("--disable-radix-cache", "use --no-enable-prefix-caching"),
        ("--chunked-prefill-size 8192", "use --max-num-batched-tokens"),
        ("--mem-fraction-static 0.8", "use --gpu-memory-utilization"),
        ("--context-length=32768", "use --max-model-len"),
        ("--model-path m", "use --model"),
        ("-c 4096", "use --max-model-len"),
        ("--ctx_size 4096", "use --max-model-len"),
        ("-ngl 99", "all layers lie where --device says"),
        ("-np 4", "use --max-num-seqs"),
        ("-fa", "the kernel is chosen by what it can do"),
        ("-fa on", "the kernel is chosen by what it can do"),
        ("-m file.gguf", "use --model"),
        ("--zzz", "--help lists"),
    ],
)
def test_flags_of_other_engines_are_refused_with_what_to_use(
    typed: str, instead: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "nowhere", *typed.split()]) == 2
    told = " ".join(capsys.readouterr().err.split())
    flag = typed.split()[0].split("=")[0].replace("_", "-")
    assert f"{flag} is not an option of kvspan: " in told or "--help lists" in instead
    assert instead in told
    assert "did you mean" not in told
