"""`--profile-steps`: sampled steps say where their time goes, and what their collectives moved."""

from pathlib import Path

import pytest

from tests.server.conftest import serving

TWO_RANKS = ("--tensor-parallel-size", "2", "--decode-context-parallel-size", "2")


@pytest.mark.slow
def test_parts_of_a_step_add_up_to_it(model: Path) -> None:
    with serving(model, "--profile-steps", *TWO_RANKS) as server:
        body = {"prompt": "hello", "max_tokens": 400, "ignore_eos": True}
        while not server.metric("kvspan_profiled_step_seconds_total"):
            with server.http as client:
                client.post("/v1/completions", json=body)
        whole = server.metric("kvspan_profiled_step_seconds_total")
        parts = server.metric("kvspan_profiled_step_part_seconds_total")
        assert 0.2 * whole < parts <= whole
        assert 0 < server.metric("kvspan_profiled_collective_seconds_total") <= 2 * parts
        assert server.metric("kvspan_profiled_collective_sent_bytes_total") > 0
        with server.http as client:
            text = client.get("/metrics").text
        assert 'group="tp+dcp",op="all_reduce",rank="1"' in text


def test_what_travels_for_the_context_of_a_prompt_is_counted(model: Path) -> None:
    """Of 200 tokens in pieces of 64, all but the first have something before them."""
    options = ("--max-num-batched-tokens", "64", "--prefill-strategy", "allgather_kv", *TWO_RANKS)
    with serving(model, *options) as server, server.http as client:
        body = {"prompt": "y" * 200, "max_tokens": 1}
        assert client.post("/v1/completions", json=body).is_success
        assert server.metric("kvspan_prefill_contexts_total") == 3
        text = client.get("/metrics").text
    assert 'kvspan_prefill_contexts_total{replica="0",strategy="allgather_kv"} 3.0' in text
    assert 'kvspan_prefill_context_sent_bytes_total{replica="0",strategy="allgather_q"} 0.0' in text
