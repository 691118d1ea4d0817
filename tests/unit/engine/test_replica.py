"""An engine's process as an event loop sees it."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvspan.clock import WallClock
from kvspan.config.engine import EngineConfig
from kvspan.config.resolved import Resolved
from kvspan.cost.memory import CachePlan
from kvspan.engine.build import resolve_engine
from kvspan.engine.messages import Begin, Chosen, Ready, encode
from kvspan.engine.meter import Meter
from kvspan.engine.replica import Care, Replica
from kvspan.errors import EngineDeadError
from kvspan.metrics import Registry
from kvspan.testing.tiny import TINY

pytestmark = pytest.mark.timeout(60)
PLAN = CachePlan(
    blocks_per_rank=1, tokens_per_rank=16, tokens_total=16, hit_unit=16, bytes_per_rank=1, why=""
)


@pytest.fixture
def resolved(tmp_path: Path) -> Resolved:
    (tmp_path / "config.json").write_text(json.dumps(TINY["llama-gqa"]))
    options = {"model": str(tmp_path), "load_format": "dummy"}
    return resolve_engine(EngineConfig.from_mapping(options))[0]


def begun(
    resolved: Resolved, monkeypatch: pytest.MonkeyPatch, *, last_words: str = "", max_restarts: int = 0
) -> Replica:
    """A replica whose engine's first two reports come at once, and then, with last words, its end."""

    class Hasty:
        def __init__(
            self, *, heard: Callable[[bytes], None], lost: Callable[[str], None], **_: Any
        ) -> None:
            self._heard, self._lost = heard, lost

        async def connect(self) -> None: ...

        async def end(self, _: float) -> None: ...

        def tell(self, _: Begin) -> None:
            self._heard(encode(Chosen(resolved, "")))
            self._heard(encode(Ready((), PLAN)))
            if last_words:
                self._lost(last_words)

    monkeypatch.setattr("kvspan.engine.replica.EngineProcess", Hasty)
    clock = WallClock()
    meter = Meter(Registry(), clock)
    return Replica({"model": resolved.model}, Care(max_restarts=max_restarts), clock=clock, meter=meter)


def test_reports_that_arrive_in_one_piece_are_all_heard(
    resolved: Resolved, monkeypatch: pytest.MonkeyPatch
) -> None:
    replica = begun(resolved, monkeypatch)
    ready = asyncio.run(replica.start())
    assert replica.chosen is not None
    assert (replica.chosen.resolved, ready.plan) == (resolved, PLAN)
    assert replica.takes_requests


def test_an_engine_that_is_lost_as_soon_as_it_is_ready_is_not_taken_for_ready(
    resolved: Resolved, monkeypatch: pytest.MonkeyPatch
) -> None:
    replica = begun(resolved, monkeypatch, last_words="It has ended.")
    with pytest.raises(EngineDeadError, match="It has ended"):
        asyncio.run(replica.start())
    assert not replica.health.ready
    assert not replica.takes_requests


@pytest.mark.parametrize(("most", "why"), [(0, "--no-restart"), (1, "1 restart(s) in ten minutes")])
def test_what_is_not_started_again_says_why(
    resolved: Resolved,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    most: int,
    why: str,
) -> None:
    replica = begun(resolved, monkeypatch, max_restarts=most)

    async def lose_it() -> None:
        await replica.start()

        async def fail() -> None:
            raise EngineDeadError("It fails.")

        monkeypatch.setattr(replica, "start", fail)
        replica.lost("It has ended.")
        while not replica.health.gone:
            await asyncio.sleep(0)

    asyncio.run(lose_it())
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == most + 1
    assert said[:-1] == ["Engine 0: It has ended. The engine is being started again."] * most
    assert "The engine is not started again: " in said[-1]
    assert why in said[-1]
