"""A cache that holds two of eight long outputs: the server preempts, and nobody can tell."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.server.conftest import MODEL, Running, serving

pytestmark = pytest.mark.timeout(60)
TOKENS_HELD = 2 * 144
TOKEN_BYTES = 256  # of the tiny model in float32: 2 layers, 2 heads of 8, keys and values
TIGHT = ("--max-model-len", "128", "--kv-cache-memory", f"{TOKENS_HELD * TOKEN_BYTES}")


def written(server: Running, number: int, *, stream: bool) -> str:
    asked = {
        "model": MODEL,
        "prompt": f"request {number}",
        "max_tokens": 100,
        "temperature": 1.0,
        "seed": number,
        "extra_body": {"ignore_eos": True},
    }
    if stream:
        chunks = server.openai.completions.create(**asked, stream=True)
        return "".join(choice.text for chunk in chunks for choice in chunk.choices)
    return str(server.openai.completions.create(**asked).choices[0].text)


def test_preempted_outputs_are_what_they_would_have_been(model: Path) -> None:
    with serving(model, *TIGHT) as server:
        alone = [written(server, number, stream=False) for number in range(8)]
        assert server.metric("kvspan_num_preemptions_total") == 0
        with ThreadPoolExecutor(8) as pool:
            together = [
                pool.submit(written, server, number, stream=number % 2 == 0) for number in range(8)
            ]
        assert [text.result() for text in together] == alone
        assert server.metric("kvspan_num_preemptions_total") > 0
        assert server.metric("kvspan_kv_used_tokens") == 0
