import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvspan.loading.dummy import DummyCheckpoint, DummyTensor
from kvspan.topology import Span

SHAPE = (2500, 7)


def draw(name: str = "a.weight", *, shape: tuple[int, ...] = SHAPE, seed: int = 0) -> torch.Tensor:
    return DummyTensor(name, shape, "test", seed).read([Span(0, n) for n in shape])


@settings(deadline=None)
@given(st.data())
def test_a_part_is_that_part_of_the_whole(data: st.DataObject) -> None:
    take = [Span(*sorted(data.draw(st.tuples(*[st.integers(0, n)] * 2)))) for n in SHAPE]
    part = DummyTensor("a.weight", SHAPE, "test", 0).read(take)
    rows, columns = (slice(span.start, span.stop) for span in take)
    assert torch.equal(part, draw()[rows, columns])


def test_values_depend_on_name_and_seed_alone() -> None:
    assert torch.equal(draw(), draw())
    assert not torch.equal(draw(), draw("b.weight"))
    assert not torch.equal(draw(), draw(seed=1))
    # The number of rows is not part of it: the blocks that both have are the same.
    assert torch.equal(draw(shape=(3000, 7))[:2048], draw()[:2048])


def test_values_have_the_scale_of_weights_and_do_not_repeat() -> None:
    values = draw(shape=(4096, 16))
    assert abs(values.std().item() - 0.02) < 0.001
    assert abs(values.mean().item()) < 0.001
    assert not torch.equal(values[:1024], values[1024:2048])


def test_norms_are_one_and_vectors_and_empty_tensors_are_drawn() -> None:
    assert torch.equal(draw("x.q_norm.weight", shape=(5,)), torch.ones(5))
    assert torch.equal(draw("input_layernorm.weight", shape=(5,)), torch.ones(5))
    assert draw("q_proj.bias", shape=(5,)).unique().numel() == 5
    assert draw(shape=(0, 3)).shape == (0, 3)


def test_a_checkpoint_has_exactly_what_is_wanted() -> None:
    wanted = {"b": (2, 3), "a.norm.weight": (4,)}
    found = DummyCheckpoint({}, "test", seed=5).tensors(wanted)
    assert {tensor.name: tensor.shape for tensor in found} == wanted
