"""`kvspan bench exchange`: every operation, size and transport once, and what it refuses."""

import json

import pytest

from kvspan.bench.exchange import OPS
from kvspan.cli.main import main
from kvspan.comm.shm import refusal

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(refusal() is not None, reason=str(refusal())),
]


def test_exchange_measures_every_operation(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "exchange", "--ranks", "3", "--rounds", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ranks"] == 3
    measured = {(t["op"], t["comm"]) for t in found["timings"]}
    assert measured == {(op, comm) for op in OPS for comm in ("shm", "gloo")}
    assert all(t["median_us"] > 0 for t in found["timings"])


def test_exchange_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "exchange", "--rounds", "1"]) == 0
    assert "Microseconds, 2 ranks on" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--ranks", "1"], "--ranks 1 is too small: 2"),
        (["--ranks", "65"], "--ranks 65 is too many: 64"),
        (["--rounds", "0"], "--rounds 0 is too small: 1"),
    ],
)
def test_exchange_refuses(flags: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "exchange", *flags]) == 2
    assert told in capsys.readouterr().err
