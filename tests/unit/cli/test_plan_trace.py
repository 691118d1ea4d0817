"""`kvspan plan --trace`: the replay asks for what the trace asks for."""

from pathlib import Path

import pytest

from kvspan.cli.main import main


def test_a_cache_need_not_hold_what_the_trace_does_not_ask(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """DeepSeek-R1 reads 163,840 tokens; beside its weights, four GPUs hold 65,280 of them."""
    trace = tmp_path / "short.jsonl"
    trace.write_text('{"timestamp":0,"input_length":1024,"output_length":5,"hash_ids":[1,2]}\n')
    asked = ["plan", "DeepSeek-R1", "--hardware", "B200-SXM", "--gpus", "8", "--trace", str(trace)]
    assert main(asked) == 0, capsys.readouterr().err
