from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from kvspan.errors import ModelError
from kvspan.layers.parameter import Target, elsewhere, sliced, whole
from kvspan.loading.apply import apply
from kvspan.topology import Span, cut


@dataclass
class FakeTensor:
    """A tensor that notes which parts of it are read."""

    name: str
    values: Tensor
    where: str = "fake.safetensors"
    reads: list[tuple[int, ...]] = field(default_factory=list)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.values.shape)

    def read(self, take: Sequence[Span]) -> Tensor:
        part = self.values[tuple(slice(s.start, s.stop) for s in take)]
        self.reads.append(tuple(part.shape))
        return part


@dataclass
class FakeCheckpoint:
    held: list[FakeTensor]
    where: str = "the fake checkpoint"
    raw_config: Mapping[str, Any] = field(default_factory=dict)
    wanted: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def tensors(self, wanted: Mapping[str, tuple[int, ...]], /) -> Iterator[FakeTensor]:
        self.wanted = wanted
        return iter(self.held)


@pytest.fixture
def checkpoint() -> FakeCheckpoint:
    shapes = {"q": (12, 6), "k": (4, 6), "o": (6, 12), "norm": (6,)}
    return FakeCheckpoint([FakeTensor(n, torch.rand(s, dtype=torch.float64)) for n, s in shapes.items()])


def rank_of_three(rank: int) -> tuple[dict[str, Target], dict[str, Tensor]]:
    """Fused q and k by rows, o by columns, norm whole; the last rank keeps nothing of q and o."""
    part = cut(12, parts=3, index=rank, unit=8)
    targets = {
        "q": sliced("qk", (12, 6), dim=0, part=part),
        "k": sliced("qk", (4, 6), dim=0, part=Span(0, 4), at=part.size),
        "o": sliced("o", (6, 12), dim=1, part=part),
        "norm": whole("norm", (6,)),
    }
    shapes = {"qk": (part.size + 4, 6), "o": (6, part.size), "norm": (6,)}
    return targets, {name: torch.full(shape, torch.nan) for name, shape in shapes.items()}


def test_every_rank_gets_its_parts_and_reads_no_more(checkpoint: FakeCheckpoint) -> None:
    values = {t.name: t.values.float() for t in checkpoint.held}
    sizes = []
    for rank in range(3):
        for tensor in checkpoint.held:
            tensor.reads.clear()
        targets, parameters = rank_of_three(rank)
        apply(checkpoint, targets, parameters, ignored=())
        part = cut(12, parts=3, index=rank, unit=8)
        sizes.append(part.size)
        rows = slice(part.start, part.stop)
        assert torch.equal(parameters["qk"], torch.cat([values["q"][rows], values["k"]]))
        assert torch.equal(parameters["o"], values["o"][:, rows])
        assert torch.equal(parameters["norm"], values["norm"])
        assert {t.name: t.reads for t in checkpoint.held} == {
            "q": [(part.size, 6)] * bool(part.size),
            "k": [(4, 6)],
            "o": [(6, part.size)] * bool(part.size),
            "norm": [(6,)],
        }
    assert sorted(sizes) == [0, 4, 8]


def test_a_checkpoint_is_told_what_is_wanted(checkpoint: FakeCheckpoint) -> None:
    apply(checkpoint, *rank_of_three(0), ignored=())
    assert checkpoint.wanted == {"q": (12, 6), "k": (4, 6), "o": (6, 12), "norm": (6,)}


def test_both_differences_are_in_one_sentence_and_nothing_is_read(checkpoint: FakeCheckpoint) -> None:
    targets, parameters = rank_of_three(0)
    targets |= {"gate": whole("gate", (3,)), "up": whole("up", (3,))}
    checkpoint.held += [FakeTensor(f"extra.{i}", torch.ones(1)) for i in range(7)]
    sentence = (
        r"the fake checkpoint lacks 2 tensors \(gate, up\) that the model needs and has 7 tensors "
        r"\(extra.0, extra.1, extra.2, extra.3, extra.4 and 2 more\) that the model does not know"
    )
    with pytest.raises(ModelError, match=sentence):
        apply(checkpoint, targets, parameters, ignored=())
    assert not any(tensor.reads for tensor in checkpoint.held)


def test_ignored_tensors_may_be_there_and_are_not_read(checkpoint: FakeCheckpoint) -> None:
    checkpoint.held.append(FakeTensor("lm_head", torch.ones(3)))
    apply(checkpoint, *rank_of_three(0), ignored={"lm_head", "not.there"})
    assert checkpoint.held[-1].reads == []


def test_a_wanted_name_cannot_be_ignored(checkpoint: FakeCheckpoint) -> None:
    targets, parameters = rank_of_three(0)
    with pytest.raises(ModelError, match=r"lacks 1 tensor \(q\)"):
        apply(checkpoint, targets, parameters, ignored={"q"})


def test_another_shape_is_told_with_both_and_nothing_is_read(checkpoint: FakeCheckpoint) -> None:
    checkpoint.held[2].values = torch.ones(6, 11)
    sentence = r"fake.safetensors: the tensor o has shape \[6, 11\], .* asks for \[6, 12\]"
    with pytest.raises(ModelError, match=sentence):
        apply(checkpoint, *rank_of_three(0), ignored=())
    assert not any(tensor.reads for tensor in checkpoint.held)


def test_a_tensor_in_two_files_is_refused(checkpoint: FakeCheckpoint) -> None:
    checkpoint.held.append(FakeTensor("k", torch.ones(4, 6), where="other.safetensors"))
    with pytest.raises(ModelError, match=r"k is both in fake.safetensors and in other.safetensors"):
        apply(checkpoint, *rank_of_three(0), ignored=())


def test_a_parameter_that_stays_unfilled_is_our_own_fault(checkpoint: FakeCheckpoint) -> None:
    targets, parameters = rank_of_three(0)
    parameters["qk"] = torch.empty(len(parameters["qk"]) + 1, 6)
    with pytest.raises(AssertionError, match="qk"):
        apply(checkpoint, targets, parameters, ignored=())


def test_a_part_that_has_no_room_is_our_own_fault(checkpoint: FakeCheckpoint) -> None:
    targets, parameters = rank_of_three(0)
    parameters["norm"] = torch.empty(6, 6)  # copy_ would broadcast
    with pytest.raises(AssertionError, match="norm"):
        apply(checkpoint, targets, parameters, ignored=())


def test_stacked_parts_have_their_place_and_others_are_not_read() -> None:
    """Two of three experts are kept, stacked, each by some of its columns."""
    held = [FakeTensor(f"e{i}", torch.rand(4, 6)) for i in range(3)]
    targets = {f"e{i}": sliced("e", (4, 6), dim=1, part=Span(2, 5), within=(i,)) for i in range(2)}
    parameters = {"e": torch.full((2, 4, 3), torch.nan)}
    apply(FakeCheckpoint(held), {**targets, "e2": elsewhere((4, 6))}, parameters, ignored=())
    for i in range(2):
        assert torch.equal(parameters["e"][i], held[i].values[:, 2:5])
    assert not held[2].reads


def test_tensors_of_other_towers_are_left_alone(checkpoint: FakeCheckpoint) -> None:
    for tensor in checkpoint.held:
        tensor.name = f"text.{tensor.name}"
    tower = FakeTensor("vision.a", torch.rand(3))
    checkpoint.held.append(tower)
    targets, parameters = rank_of_three(0)
    prefixed = {f"text.{name}": target for name, target in targets.items()}
    with pytest.raises(ModelError, match=r"has 1 tensor \(vision.a\)"):
        apply(checkpoint, prefixed, parameters, ignored=())
    apply(checkpoint, prefixed, parameters, ignored=(), prefix="text.")
    assert not tower.reads
