"""Where time goes: spans nest, what is inside is not counted twice, and nothing is noted while off."""

import pytest
import torch

from kvspan.clock import VirtualClock
from kvspan.comm.group import Group, Pending, Piece
from kvspan.comm.local import LocalWorld
from kvspan.step import TimedSpan
from kvspan.testing.ranks import run_ranks, shared_worlds
from kvspan.topology import Span, Topology
from kvspan.worker.watch import Recorder, WatchedGroup, WatchedWorld, group_name


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


@pytest.mark.parametrize(
    ("topology", "names"),
    [
        (Topology(tp_size=2, dcp_size=2), ["tp+dcp", "tp+dcp", "pcp"]),
        (Topology(tp_size=4, dcp_size=2), ["tp", "dcp", "pcp"]),
        (Topology(tp_size=1, pcp_size=2, dcp_size=2), ["tp", "dcp+pcp", "dcp+pcp"]),
        (Topology(tp_size=2, pcp_size=2, dcp_size=2), ["tp", "dcp+pcp", "dcp+pcp"]),
    ],
    ids=str,
)
def test_groups_are_called_by_what_they_are_for(topology: Topology, names: list[str]) -> None:
    partitions = (topology.tp_groups(), topology.dcp_groups(), topology.pcp_groups())
    assert [group_name(topology, partition) for partition in partitions] == names


def test_what_a_rank_sends_is_counted_round_a_ring() -> None:
    """Rank 0 of two brings 3 rows of 4 float32 where rank 1 brings one."""

    def body(world: LocalWorld) -> list[tuple[str, str, int]]:
        recorder = Recorder(VirtualClock())
        watched = WatchedWorld(world, recorder, Topology(tp_size=2, dcp_size=2))
        group, sizes = watched.group([(0, 1)]), (3, 1)
        recorder.switch(True)
        mine = torch.ones(sizes[world.rank], 4)
        pending: list[Pending[object]] = [
            group.all_reduce(torch.ones(4, 4)),
            group.all_gather(mine, sizes),
            group.reduce_scatter(torch.ones(4, 4), sizes),
            group.all_to_all([torch.ones(5), torch.ones(7)], [5 + 2 * world.rank] * 2),
        ]
        for each in pending:
            each.wait()
        return [(s.group, s.op, s.sent_bytes) for s in recorder.switch(False) if s.sent_bytes]

    first, second = run_ranks(2, body)
    names = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
    assert first == [("tp+dcp", op, n) for op, n in zip(names, (64, 48, 16, 28), strict=True)]
    assert second == [("tp+dcp", op, n) for op, n in zip(names, (64, 16, 48, 20), strict=True)]


def test_merged_pieces_are_counted_with_their_sums() -> None:
    """2 rows of 3 heads of 4, cut at the 7th of 12 columns: 2 and 2 heads are touched."""
    pieces = [Piece(slice(0, 2), Span(0, 7)), Piece(slice(0, 2), Span(7, 12))]
    with shared_worlds(2) as worlds:

        def body(world: LocalWorld) -> int:
            recorder = Recorder(VirtualClock())
            inner: Group = worlds[world.rank].group([(0, 1)])
            group = WatchedGroup(inner, recorder, "dcp")
            recorder.switch(True)
            merged = group.merge_scatter(torch.ones(2, 3, 4), torch.zeros(2, 3), pieces)
            assert merged is not None
            merged.wait()
            return sum(span.sent_bytes for span in recorder.switch(False))

        assert run_ranks(2, body) == [2 * (5 * 4 + 2 * 4), 2 * (7 * 4 + 2 * 4)]
