"""Tapes: what is played is what was recorded, with other inputs; what cannot be played says so."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from kvspan.attention.backends.cpu import NativeKernel
from kvspan.attention.contract import FlatIndex, KeyIndex
from kvspan.comm.dist import DistGroup, DistWorld
from kvspan.layers.rows import row_ops
from kvspan.native import native_path
from kvspan.worker.tape import Scratch, Tape

pytestmark = pytest.mark.skipif(native_path().isa is None, reason=native_path().why)

ROWS, SIZE = 3, 64


def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    ops = row_ops(x)
    return ops.silu_mul(ops.rms_norm(x, weight, 1e-5))


@pytest.mark.parametrize("threads", [1, 3])
def test_it_plays_what_was_recorded_with_other_inputs(threads: int) -> None:
    x, weight = torch.randn(2000, SIZE), torch.randn(SIZE)  # rows for several threads
    tape = Tape([x], Scratch())
    with torch.inference_mode():
        out = tape.record(lambda: normed(x, weight))
    assert tape.refusal is None
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for _ in range(50):
            x.normal_()
            tape.play()
            assert torch.equal(out, normed(x, weight))
    finally:
        torch.set_num_threads(before)


def test_what_only_torch_can_do_is_done_and_spoils_the_tape() -> None:
    x = torch.randn(ROWS, SIZE)
    tape = Tape([x], Scratch())
    with torch.inference_mode():
        out = tape.record(lambda: x[:, :8].reshape(-1) * 2)
    assert torch.equal(out, x[:, :8].flatten() * 2)
    assert tape.refusal is not None
    assert "aten" in tape.refusal


@pytest.mark.parametrize("of_the_step", [True, False])
def test_an_index_that_the_next_step_does_not_fill_spoils_the_tape(of_the_step: bool) -> None:
    flat = FlatIndex(*(torch.tensor(x) for x in ([0, 1], [0, 1], [0], [0], [5])))
    query, keys = torch.randn(1, 2, 64), torch.randn(1, 1, 16, 64)
    inputs = [flat.row_starts, flat.table_starts, flat.blocks, flat.first, flat.last]
    tape = Tape(inputs if of_the_step else inputs[:-1], Scratch())
    with torch.inference_mode():
        tape.record(lambda: NativeKernel()(query, keys, keys, KeyIndex.over(flat), 1.0)[0])
    assert (tape.refusal is None) == of_the_step


def test_an_index_over_its_flat_form_sees_what_is_written_there() -> None:
    index = KeyIndex(
        (0, 1, 2), (torch.tensor([3]), torch.tensor([1, 2])), *torch.tensor([[0, 0], [4, 9]]).numpy()
    )
    over = KeyIndex.over(index.flat)
    assert over.row_starts == index.row_starts
    assert all(map(torch.equal, over.tables, index.tables))
    over.flat.last[0] = 6
    assert over.last.tolist() == [6, 9]


def test_scratch_is_handed_out_again_when_the_last_view_is_gone() -> None:
    scratch = Scratch()
    first = scratch.empty((4, 8), torch.float32)
    view, address = first[1:], first.data_ptr()
    del first
    assert scratch.empty((4, 8), torch.float32).data_ptr() != address
    del view
    assert scratch.empty((64,), torch.bfloat16).data_ptr() == address


def test_what_is_shared_can_be_read_and_is_handed_out_again() -> None:
    scratch = Scratch()
    lent = scratch.empty((5, 7), torch.float32)
    lent.copy_(torch.arange(35.0).view(5, 7))
    shared = scratch.shared(lent)
    assert torch.equal(shared, lent)
    address = lent.data_ptr()
    del lent
    assert scratch.empty((33,), torch.float32).data_ptr() == address == shared.data_ptr()


def test_memory_that_is_not_of_the_scratch_is_left_alone() -> None:
    x = torch.randn(3)
    assert Scratch().shared(x) is x


def test_scratch_of_one_tape_serves_another_of_about_its_size() -> None:
    scratch = Scratch()
    address = scratch.empty((5, 7), torch.float32).data_ptr()
    assert scratch.empty((3, 21), torch.float32).data_ptr() == address


def test_a_collective_of_torchs_spoils_the_tape(tmp_path: Path) -> None:
    """It is no operator on tensors that a recording could do without."""
    world = DistWorld.connect(rank=0, size=1, store_path=str(tmp_path / "store"), timeout_s=20.0)
    try:
        group = DistGroup(dist.new_group([0]), rank=0, size=1)
        x = torch.ones(ROWS)
        tape = Tape([x], Scratch())
        with torch.inference_mode():
            assert torch.equal(tape.record(lambda: group.all_reduce(x).wait()), torch.ones(ROWS))
    finally:
        world.close()
    assert tape.refusal is not None
    assert "c10d" in tape.refusal


def test_calls_are_timed_by_what_they_count_as() -> None:
    x, weight = torch.randn(ROWS, SIZE), torch.randn(SIZE)
    tape = Tape([x], Scratch())
    with torch.inference_mode():
        tape.record(lambda: normed(x, weight))
    times = tape.play_timed()
    assert [work.name for work, _, _ in times] == ["rows", "rows"]
    assert all(start_s <= stop_s for _, start_s, stop_s in times)
