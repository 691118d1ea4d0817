"""`--profile-steps`: sampled steps say where their time goes."""

from pathlib import Path

import pytest

from tests.server.conftest import serving


@pytest.mark.slow
def test_parts_of_a_step_add_up_to_it(model: Path) -> None:
    with serving(model, "--profile-steps") as server:
        body = {"prompt": "hello", "max_tokens": 400, "ignore_eos": True}
        while not server.metric("kvspan_profiled_step_seconds_total"):
            with server.http as client:
                client.post("/v1/completions", json=body)
        whole = server.metric("kvspan_profiled_step_seconds_total")
        parts = server.metric("kvspan_profiled_step_part_seconds_total")
        assert 0.2 * whole < parts <= whole
