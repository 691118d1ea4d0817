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


def test_clients_that_leave_an_overfull_cache_are_counted_and_change_no_text(model: Path) -> None:
    with serving(model, *TIGHT) as server:
        alone = [written(server, number, stream=False) for number in range(4)]
        with ThreadPoolExecutor(8) as pool:
            staying = [pool.submit(written, server, number, stream=True) for number in range(4)]
            leaving = [pool.submit(left, server, number) for number in range(4, 8)]
        assert [text.result() for text in staying] == alone
        assert all(gone.result() for gone in leaving)
        assert server.metric("kvspan_num_preemptions_total") > 0
        server.await_metric("kvspan_kv_used_tokens", 0)
        assert server.sample('kvspan_request_success_total{finished_reason="length"}') == 8
        assert server.sample('kvspan_request_success_total{finished_reason="abort"}') == 4


def left(server: Running, number: int) -> bool:
    """Reads a few chunks of an output and goes; whether there were any."""
    asked = {"model": MODEL, "prompt": f"request {number}", "max_tokens": 100, "stream": True}
    body = {**asked, "temperature": 1.0, "seed": number, "ignore_eos": True}
    with server.http as client, client.stream("POST", "/v1/completions", json=body) as reply:
        return any(line for _, line in zip(range(9), reply.iter_lines(), strict=False))
