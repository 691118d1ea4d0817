"""Nonsense on the command line ends in one sentence and exit 2, before anything runs."""

from itertools import pairwise

import pytest

from kvspan.cli.main import main
from kvspan.config.engine import ENGINE_OPTIONS
from kvspan.config.options import Option
from kvspan.config.server import SERVER_OPTIONS

DECODE, ELASTIC = ["bench", "decode", "nowhere"], ["bench", "elastic", "nowhere"]
SWEEP = ["bench", "sweep", "nowhere", "--trace", "nothing"]


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
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_nonsense_is_refused(line: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(line) == 2
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
        ("--no-mmproj", "--help lists"),
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
