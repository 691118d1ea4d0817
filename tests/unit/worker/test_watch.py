"""Where time goes: spans nest, what is inside is not counted twice, and nothing is noted while off."""

from kvspan.clock import VirtualClock
from kvspan.step import TimedSpan
from kvspan.worker.watch import Recorder


def test_a_span_owns_what_no_inner_span_does() -> None:
    clock = VirtualClock()
    recorder = Recorder(clock)
    recorder.switch(True)
    with recorder.span("step"):
        clock.advance(1.0)
        with recorder.span("linear"):
            clock.advance(2.0)
            with recorder.span("exchange"):
                clock.advance(4.0)
        with recorder.span("linear"):
            clock.advance(8.0)
    assert recorder.switch(True) == [
        TimedSpan("exchange", 3.0, 7.0, 4.0),
        TimedSpan("linear", 1.0, 7.0, 2.0),
        TimedSpan("linear", 7.0, 15.0, 8.0),
        TimedSpan("step", 0.0, 15.0, 1.0),
    ]
    assert recorder.switch(False) == []


def test_nothing_is_noted_while_off() -> None:
    recorder = Recorder(VirtualClock())
    with recorder.span("step"):
        pass
    assert recorder.switch(True) == []
