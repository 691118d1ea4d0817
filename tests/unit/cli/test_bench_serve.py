"""`kvspan bench serve` as a user meets it, on a tiny engine of this process and on a server."""

import csv
import json
from pathlib import Path

import pytest
from tests.unit.bench.fake_server import FakeServer

from kvspan.cli.main import main
from kvspan.testing.checkpoints import write_checkpoint
from kvspan.testing.tiny import TINY

SMALL = ["--kv-cache-memory", "1MiB", "--max-model-len", "160", "--num-threads", "1"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("model")
    write_checkpoint(directory, TINY["llama-gqa"], seed=5)
    return str(directory)


@pytest.fixture
def trace(tmp_path: Path) -> list[str]:
    """Three turns of one session, and a row that is too long for the model."""
    rows = [
        (0, 20, [0, 1, 2]),
        (10, 40, [0, 1, 3, 4, 5]),
        (20, 60, [0, 1, 3, 4, 6, 7, 8, 9]),
        (30, 200, []),
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text(
        "\n".join(
            json.dumps({"timestamp": t, "input_length": n, "output_length": 4, "hash_ids": ids})
            for t, n, ids in rows
        )
    )
    return ["bench", "serve", "--trace", str(path), "--trace-block-size", "8"]


def test_an_answer_for_which_there_is_no_room_is_refused_and_not_cut(model: str, tmp_path: Path) -> None:
    path, out = tmp_path / "trace.jsonl", tmp_path / "out.json"
    rows = [{"timestamp": 0, "input_length": 150, "output_length": n} for n in (10, 11)]
    path.write_text("\n".join(map(json.dumps, rows)))
    asked = ["bench", "serve", model, "--trace", str(path), *SMALL, "--json", str(out)]
    assert main(asked) == 0
    found = json.loads(out.read_text())
    assert (found["num_ok"], found["num_errors"]) == (1, 1)
    assert "150 tokens of prompt and 11 of output" in next(iter(found["errors"]))


def test_a_closed_loop_in_process(
    model: str, trace: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = {name: tmp_path / f"out.{name}" for name in ("json", "csv", "html")}
    flags = [text for name, path in out.items() for text in (f"--{name}", str(path))]
    assert main([*trace, model, "--concurrency", "1", *SMALL, *flags]) == 0
    found = json.loads(out["json"].read_text())
    assert (found["num_ok"], found["num_errors"]) == (3, 1)
    assert "160" in next(iter(found["errors"]))
    assert found["hit_rate"] == pytest.approx((16 + 32) / (40 + 60))  # the first opens the steady window
    assert found["engine"]["preemptions"] == 0
    rows = list(csv.DictReader(out["csv"].read_text().splitlines()))
    assert [row["output_tokens"] for row in rows if row["finished"] == "1"] == ["4"] * 3
    page = out["html"].read_text()
    assert page.count("<svg") >= 7
    assert "kvspan" in page
    shown = capsys.readouterr().out
    assert "TPOT" in shown
    assert "1 x The prompt has 200 tokens" in shown


def test_an_open_loop_in_process(
    model: str, trace: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*trace, model, "--rows", "3", "--speed-up", "10", "--json", *SMALL]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["num_ok"], found["num_errors"]) == (3, 0)
    assert found["latencies"]["num_requests"] == 3


def test_a_profile_has_a_row_for_each_rank(model: str, trace: list[str], tmp_path: Path) -> None:
    profile = tmp_path / "profile.json"
    ranks = ["--tensor-parallel-size", "2", "--distributed-executor-backend", "inprocess"]
    watch = ["--profile", str(profile), "--profile-skip", "2", "--profile-steps", "5"]
    assert main([*trace, model, "--rows", "3", "--concurrency", "3", *watch, *ranks, *SMALL]) == 0
    events = json.loads(profile.read_text())["traceEvents"]
    rows = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert list(rows.values()) == ["engine", "rank 0", "rank 1"]
    spans = [e for e in events if e["ph"] == "X"]
    for row in (1, 2):
        names = {e["name"] for e in spans if e["tid"] == row}
        assert {"step", "prepare", "linear", "attention", "exchange"} <= names
    assert sum(e["name"] == "step" and e["tid"] == 1 for e in spans) <= 5
    assert {e["name"] for e in spans if e["tid"] == 0} == {"schedule", "take in"}
    assert min(e["ts"] for e in spans) == 0
    assert all(e["dur"] >= 0 for e in spans)


def test_a_server(trace: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with FakeServer().running() as fake:
        arguments = [*trace, "--url", fake.url, "--api-key", "secret", "--num-ranks", "2"]
        assert main([*arguments, "--extra-body", '{"ignore_eos": null}', "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["num_ok"] == 4
    assert found["output_tokens_per_s_per_rank"] == pytest.approx(found["output_tokens_per_s"] / 2)
    assert all("ignore_eos" not in body for body in fake.bodies)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ([], ["--url"]),
        (["some-model", "--url", "http://x"], ["--url"]),
        (["m", "--concurrency", "0"], ["--concurrency 0"]),
        (["--url", "http://127.0.0.1:9"], ["--url", "does not answer"]),
        (["--url", "http://127.0.0.1:9", "--extra-body", "[]"], ["--extra-body"]),
        (["m", "--concurrency", "1", "--speed-up", "2"], ["--concurrency", "--speed-up"]),
        (["m", "--speed-up", "0"], ["--speed-up 0"]),
        (["m", "--rows", "0"], ["--rows 0"]),
        (["m", "--profile-steps", "0"], ["--profile-steps 0"]),
        (["--url", "http://127.0.0.1:9", "--profile", "x"], ["--profile", "--url"]),
        (["m", "--duration", "0"], ["--duration 0"]),
        (["m", "--trace-block-size", "7"], ["line 2", "blocks of 7"]),
    ],
    ids=str,
)
def test_refusals_are_sentences(
    flags: list[str],
    says: list[str],
    model: str,
    trace: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([*trace, *[model if text == "m" else text for text in flags], *SMALL]) == 2
    message = capsys.readouterr().err
    for word in says:
        assert word in message
