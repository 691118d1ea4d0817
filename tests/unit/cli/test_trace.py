"""`kvspan trace` as a user meets it."""

import json
from pathlib import Path

import pytest

from kvspan.cli.main import main
from kvspan.trace.mooncake import ReadOptions, read_trace


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl.gz"
    assert main(["trace", "synth", "--rows", "40", "--scale", "64", "--output", str(path)]) == 0
    return path


def test_synth_writes_what_stats_reads(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["trace", "stats", str(trace), "--trace-block-size", "8", "--scale", "64"]
    assert main([*arguments, "--json"]) == 0
    stats = json.loads(capsys.readouterr().out)
    assert stats["num_rows"] == 40
    assert [each["bucket"] for each in stats["buckets"]][:2] == ["<32K", "32-64K"]
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    assert "40 rows" in shown
    assert "64-128K" in shown


def test_synth_goes_to_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "synth", "--rows", "3", "--scale", "8"]) == 0
    printed = capsys.readouterr()
    assert "--trace-block-size 64" in printed.err
    lines = printed.out.splitlines()
    assert [set(json.loads(line)) for line in lines] == [
        {"timestamp", "input_length", "output_length", "hash_ids"}
    ] * 3


def test_cut_writes_a_part(trace: Path, tmp_path: Path) -> None:
    part = tmp_path / "part.jsonl"
    cut = ["--rows", "5", "--max-output", "3", "--scale", "2", "--trace-block-size", "8"]
    assert main(["trace", "cut", str(trace), *cut, "--output", str(part)]) == 0
    rows = read_trace(part, ReadOptions(block_tokens=4)).rows
    assert len(rows) == 5
    assert max(row.output_length for row in rows) <= 2


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["stats", "missing.jsonl"], ["missing.jsonl", "No such file"]),
        (["stats", "{bad}"], ["line 13", "--skip-bad"]),
        (["stats", "{bad}", "--skip-bad", "--hit-unit", "0"], ["--hit-unit 0"]),
        (["stats", "{bad}", "--timestamp-unit", "h"], ["--timestamp-unit h"]),
        (["synth", "--profile", "none"], ["--profile none", "agentic"]),
        (["synth", "--scale", "3"], ["--scale 3", "512"]),
        (["synth", "--output-scale", "0"], ["--output-scale 0"]),
        (["cut", "{bad}", "--skip-bad", "--skip", "99"], ["Nothing is left"]),
        (["count"], ["count"]),
    ],
    ids=str,
)
def test_refusals_are_sentences(
    arguments: list[str], says: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = tmp_path / "bad.jsonl"
    good = '{"timestamp": 0, "input_length": 5, "output_length": 5, "hash_ids": [0]}'
    malformed = '{"timestamp": 0, "input_length": 17448, "output_length":2748 610, "hash_ids": [0]}'
    bad.write_text("\n".join([good] * 12 + [malformed]))
    assert main(["trace", *(text.format(bad=bad) for text in arguments)]) == 2
    message = capsys.readouterr().err
    for word in says:
        assert word in message


@pytest.mark.parametrize("other_name", [False, True], ids=["its-name", "a-link"])
def test_cut_does_not_write_over_what_it_cuts(
    other_name: bool, trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = trace.read_bytes()
    output = trace
    if other_name:
        output = tmp_path / "link.jsonl.gz"
        output.symlink_to(trace)
    cut = ["trace", "cut", str(trace), "--trace-block-size", "8", "--rows", "5"]
    assert main([*cut, "--output", str(output)]) == 2
    assert f"--output {output} is the trace that is cut" in capsys.readouterr().err
    assert trace.read_bytes() == before


def test_skipped_lines_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 5, "output_length": 5}\nnonsense\n')
    assert main(["trace", "stats", str(path), "--skip-bad"]) == 0
    assert "1 bad lines skipped" in capsys.readouterr().out
