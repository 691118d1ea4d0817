"""An engine's process as an event loop sees it."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvspan.clock import WallClock
from kvspan.config.engine import EngineConfig
from kvspan.cost.memory import CachePlan
from kvspan.engine.build import resolve_engine
from kvspan.engine.messages import Begin, Chosen, Ready, encode
from kvspan.engine.meter import Meter
from kvspan.engine.replica import Replica
from kvspan.metrics import Registry
from kvspan.testing.tiny import TINY


@pytest.mark.timeout(60)
def test_reports_that_arrive_in_one_piece_are_all_heard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY["llama-gqa"]))
    options = {"model": str(tmp_path), "load_format": "dummy"}
    resolved, _ = resolve_engine(EngineConfig.from_mapping(options))
    plan = CachePlan(
        blocks_per_rank=1, tokens_per_rank=16, tokens_total=16, hit_unit=16, bytes_per_rank=1, why=""
    )

    async def started() -> tuple[Chosen | None, Ready]:
        clock = WallClock()
        meter = Meter(Registry(), clock)
        replica = Replica(options, max_restarts=0, profile=False, clock=clock, meter=meter)

        class Hasty:
            """An engine whose first two reports come at once."""

            def __init__(self, *, heard: Callable[[bytes], None], **_: Any) -> None:
                self._heard = heard

            async def connect(self) -> None: ...

            def tell(self, _: Begin) -> None:
                self._heard(encode(Chosen(resolved, "")))
                self._heard(encode(Ready((), plan)))

        monkeypatch.setattr("kvspan.engine.replica.EngineProcess", Hasty)
        ready = await replica.start()
        return replica.chosen, ready

    chosen, ready = asyncio.run(started())
    assert chosen is not None
    assert (chosen.resolved, ready.plan) == (resolved, plan)
