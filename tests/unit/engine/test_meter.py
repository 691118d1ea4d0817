"""What is measured of steps: how many had an exchange or a team, and who left a full home."""

from kvspan.clock import VirtualClock
from kvspan.engine.core import EngineLoad, EngineStats
from kvspan.engine.messages import Stepped
from kvspan.engine.meter import Meter
from kvspan.metrics import Registry


def test_steps_with_and_without_an_exchange_are_counted_apart() -> None:
    registry = Registry()
    meter = Meter(registry, VirtualClock())
    stats = EngineStats(steps=10, exchange_steps=3, shared_steps=1, team_steps=4, spills=2)
    meter.stepped("0", Stepped((), stats, EngineLoad(0, 0, ()), 0.1))
    values = {metric.name: metric.values for metric in registry}
    assert values["kvspan_steps_total"] == {("0", "yes"): 3, ("0", "no"): 7}
    assert values["kvspan_shared_prompt_steps_total"] == {("0",): 1}
    assert values["kvspan_team_steps_total"] == {("0",): 4}
    assert values["kvspan_requests_spilled_total"] == {("0",): 2}
