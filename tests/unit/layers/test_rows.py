"""Rows of several kinds, taken apart and put together."""

import torch

from kvspan.layers.rows import some_rows, together


def test_all_rows_of_one_kind_are_not_copied() -> None:
    x = torch.arange(6.0).view(3, 2)
    assert some_rows(x, slice(0, 3)) is x
    assert together(3, [(slice(0, 0), x[:0]), (slice(0, 3), x)]) is x


def test_rows_of_several_kinds_come_together_in_order() -> None:
    x = torch.arange(10.0).view(5, 2)
    kinds: list[slice | torch.Tensor] = [slice(0, 0), slice(1, 3), torch.tensor([4, 0, 3])]
    apart = [(rows, some_rows(x, rows)) for rows in kinds]
    assert torch.equal(together(5, apart), x)


def test_a_rank_without_rows_has_an_empty_tensor() -> None:
    none = torch.empty(0, 4)
    assert together(0, [(slice(0, 0), none), (slice(0, 0), none)]).shape == (0, 4)
