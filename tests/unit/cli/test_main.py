"""The command line as a user meets it: exit codes, sentences, streams."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvspan.cli.main import COMMANDS, main
from kvspan.testing.checkpoints import write_checkpoint, write_tokenizer
from kvspan.testing.tiny import TINY


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("model")
    write_checkpoint(directory, TINY["llama-gqa"], seed=5)
    write_tokenizer(directory, vocab_size=203)
    return str(directory)


SMALL = ["--kv-cache-memory", "8MiB", "--max-model-len", "160", "--num-threads", "1"]


def test_generate_writes_text_to_stdout_and_the_rest_to_stderr(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["generate", model, "--prompt", "hello", "--max-tokens", "5", "--temperature", "0"]
    assert main([*arguments, "--ignore-eos", *SMALL]) == 0
    streamed = capsys.readouterr()
    assert main([*arguments, "--ignore-eos", "--json", *SMALL]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["outputs"][0]["text"] + "\n" == streamed.out
    assert len(result["outputs"][0]["token_ids"]) == 5
    assert "KV cache" in streamed.err
    assert "units of 16 tokens" in streamed.err


def test_generate_takes_what_is_not_typed_from_the_generation_config(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "generation_config.json").write_text('{"max_new_tokens": 3, "top_k": 1}')
    run = ["generate", model, "--prompt", "hello", "--ignore-eos", "--json", *SMALL]
    for typed, count in (([], 3), (["--max-tokens", "4"], 4)):
        assert main([*run, "--generation-config", str(tmp_path), *typed]) == 0
        captured = capsys.readouterr()
        assert len(json.loads(captured.out)["outputs"][0]["token_ids"]) == count
        assert "have top_k 1, max_tokens 3" in captured.err


def test_generate_reads_a_file_and_answers_as_a_chat(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "prompt.txt").write_text("hello")
    (tmp_path / "template.jinja").write_text("{{ messages[0].content }}!")
    prompt = ["--prompt-file", str(tmp_path / "prompt.txt"), "--chat", "--max-tokens", "1", "--json"]
    assert main(["generate", model, *prompt, "--system", "be brief", *SMALL]) == 0
    result = json.loads(capsys.readouterr().out)
    assert len(result["prompt_token_ids"]) == len("[system]be brief[user]hello>")
    template = ["--chat-template", str(tmp_path / "template.jinja")]
    assert main(["generate", model, *prompt, *template, *SMALL]) == 0
    assert len(json.loads(capsys.readouterr().out)["prompt_token_ids"]) == len("hello!")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["-tp", "8", "-dcp", "3"], ["8", "3", "Layouts that fit"]),
        (["--block-size", "16", "--cp-kv-cache-interleave-size", "12"], ["12", "16"]),
        (["--kv-cache-memory", "1KiB"], ["--kv-cache-memory", "160"]),
        (["--tensor-paralel-size", "2"], ["--tensor-paralel-size", "--tensor-parallel-size"]),
        (["--enforce-eager"], ["--enforce-eager"]),
        (["--pipeline-parallel-size", "2"], ["--pipeline-parallel-size"]),
        (["--temperature", "-1"], ["temperature", "-1"]),
        (["--top-p", "1.5"], ["top_p", "1.5"]),
        (["--max-tokens", "0"], ["max_tokens", "0"]),
        (["--max-tokens", "many"], ["--max-tokens", "many"]),
        (["--system", "x"], ["--chat"]),
        (["--chat", "--chat-template", "{broken}"], ["--chat-template", "broken.jinja", "Jinja"]),
        (["--config", "no-such.yaml"], ["no-such.yaml"]),
        (["surplus"], ["surplus"]),
    ],
    ids=lambda x: " ".join(x),
)
def test_a_refusal_is_one_sentence_and_exit_code_2(
    model: str,
    arguments: list[str],
    says: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "broken.jinja").write_text("{% for %}")
    arguments = [text.replace("{broken}", str(tmp_path / "broken.jinja")) for text in arguments]
    assert main(["generate", model, "--prompt", "hello", *SMALL, *arguments]) == 2
    shown = capsys.readouterr()
    assert not shown.out
    refusal = shown.err.strip().splitlines()[-1]
    assert refusal.startswith("kvspan: ")
    assert "Traceback" not in shown.err
    for part in says:
        assert part in refusal


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["generate", "no-such-model", "--prompt", "x"], "no-such-model"),
        (["generate", "--prompt", "x"], "model"),
        (["generate", "x", "--prompt", "a", "--prompt-file", "b"], "--prompt"),
        (["generate", "x", "--prompt-file", "no-such-file"], "no-such-file"),
        (["nonsense"], "nonsense"),
        ([], "COMMAND"),
        (["fetch", "gpt-5"], "gpt-5"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else "",
)
def test_other_refusals(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert says in capsys.readouterr().err


def test_a_prompt_over_the_limit_names_both_numbers(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", model, "--prompt", "x" * 200, *SMALL]) == 2
    refusal = capsys.readouterr().err
    assert "200" in refusal
    assert "160" in refusal


def test_check_says_equal_and_exits_0(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    layout = ["-tp", "2", "-dcp", "2", "--distributed-executor-backend", "inprocess"]
    small = ["--max-model-len", "160", "--num-threads", "1"]
    assert main(["check", model, *layout, *small]) == 0
    shown = capsys.readouterr()
    assert "equal: -tp 2 -dcp 2" in shown.out
    assert "run 1 of 3, float32, one rank: loading (" in shown.err
    assert re.search(r"run 3 of 3, float32, the layout in chunks of 49: loading .* to go\)", shown.err)
    assert main(["check", model, *layout, *small, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["equal"] is True
    assert [run["different"] for run in result["exact"]] == [0, 0, 0]
    assert result["dtype"] == result["kv_dtype"] == "float32"


@pytest.mark.parametrize("command", COMMANDS)
def test_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([command, "--help"])
    assert end.value.code == 0
    assert COMMANDS[command] in capsys.readouterr().out.replace("\n", " ").replace("  ", " ")


def test_as_a_module_and_quickly() -> None:
    run = [sys.executable, "-X", "importtime", "-m", "kvspan", "--help"]
    done = subprocess.run(run, capture_output=True, text=True, check=True)
    assert "generate" in done.stdout
    assert " torch\n" not in done.stderr  # in the list of what was imported
