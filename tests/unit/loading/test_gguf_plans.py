"""A GGUF file is planned from its metadata: the numbers of its config, without torch."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvspan.config.model import parse_model_config
from kvspan.cost.memory import kv_bytes_per_token
from kvspan.cost.weights import WeightDtypes, weight_dtypes
from kvspan.errors import ModelError
from kvspan.plan.models import find_model


@pytest.mark.parametrize("in_directory", [False, True])
def test_a_gguf_file_has_the_sizes_of_its_config(
    write_gguf: Callable[..., Any], config: Callable[..., dict[str, Any]], in_directory: bool
) -> None:
    path, _ = write_gguf("llama", config())
    found = find_model(str(path.parent if in_directory else path))
    theirs = parse_model_config(config() | {"torch_dtype": "bfloat16"}, where="test")
    assert kv_bytes_per_token(found.config, kv_dtype_bytes=2) == 2 * 2 * 2 * 32 * 2
    for size in ("num_layers", "hidden_size", "intermediate_size", "vocab_size", "heads", "head_dim"):
        assert getattr(found.config, size) == getattr(theirs, size)
    assert weight_dtypes("auto", found.raw, found.config) == WeightDtypes()


def test_a_directory_of_several_says_that_it_has_no_config(
    write_gguf: Callable[..., Any], tmp_path: Path
) -> None:
    write_gguf("llama")
    write_gguf("qwen2")
    with pytest.raises(ModelError, match=r"has no config\.json"):
        find_model(str(tmp_path))


def test_a_broken_file_is_an_error_and_planning_loads_no_torch(
    write_gguf: Callable[..., Any], tmp_path: Path
) -> None:
    path, _ = write_gguf("llama")
    code = (
        "import sys; from kvspan.cli.main import main; "
        f"found = main(['plan', {str(path)!r}, '--gpus', '1', '--output', '8']); "
        "sys.exit(3 if 'torch' in sys.modules else found)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "llama-F32" in done.stdout
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF")
    with pytest.raises(ModelError, match="broken"):
        find_model(str(broken))
