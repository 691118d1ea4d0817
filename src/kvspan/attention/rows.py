"""How rows that PCP coordinates share out meet in attention. Knows counts of rows; knows no requests.

Every coordinate works on its own rows through the whole network. A row has a **reach**: how far its
query travels, and who exchanges what it sees.

    local     all its keys are at its coordinate: with W = 1, and of a request whose blocks all are
    spread    its keys are all over the DCP group: its query goes to every coordinate of it

New keys of rows that others may ask too are gathered over the coordinates, in their order, before the
cache is written; those of a request that has one coordinate for a home stay there. One coordinate is an
ordinary value.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Self

import torch
from torch import Tensor

from kvspan.attention.exchange import Exchange, make_exchange
from kvspan.comm.group import Group, Piece, World
from kvspan.comm.local import solo
from kvspan.topology import Span, Topology


@dataclass(frozen=True, slots=True)
class RowGroups:
    """Who works on other rows, and who on the same.

    Args:
        pcp: ranks with the same weights that work on other rows, in order of their coordinate.
        columns: ranks that share the query columns of the same rows: a part of the DCP group.
    """

    pcp: Group
    columns: Group

    @classmethod
    def of(cls, world: World, topology: Topology, dcp: Group) -> Self:
        """This rank's; a collective, since groups are made.

        Args:
            world: all ranks.
            topology: the grid of ranks.
            dcp: the DCP group, which `columns` mostly is.
        """
        same = topology.column_groups() == topology.dcp_groups()
        return cls(
            pcp=world.group(topology.pcp_groups()),
            columns=dcp if same else world.group(topology.column_groups()),
        )


def gather_rows(group: Group, sizes: Sequence[int], *tensors: Tensor) -> list[Tensor]:
    """Puts everybody's rows one below the other.

    Args:
        group: who has the others.
        sizes: rows of each rank of the group that are gathered.
        tensors: [n, ...], this rank's rows; those after the first sizes[rank] stay here alone.

    Returns:
        [sum of sizes + n - sizes[rank], ...] of each: everybody's rows, and then those that stayed.
    """
    if group.size == 1 or not any(sizes):  # alone, they are in order; with none, so all ranks see it
        return list(tensors)
    own = sizes[group.rank]
    under_way = [group.all_gather(x[:own].contiguous(), sizes) for x in tensors]
    gathered = [pending.wait() for pending in under_way]
    return [
        every if len(x) == own else torch.cat([every, x[own:]])
        for every, x in zip(gathered, tensors, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class Reach:
    """How rows of one kind come by what they see.

    Args:
        group: ranks over which their queries are gathered.
        exchange: how partial results meet.
    """

    group: Group
    exchange: Exchange


def make_reaches(name: str, groups: RowGroups, dcp: Group) -> tuple[Reach, Reach]:
    """The reaches of rows: spread, and local.

    Args:
        name: the exchange, `a2a` or `ag_rs`.
        groups: who works on other rows, and who on the same.
        dcp: ranks that share sequences.
    """
    return (
        Reach(groups.pcp, make_exchange(name, dcp)),
        Reach(solo(), make_exchange(name, groups.columns)),
    )


@lru_cache(maxsize=256)
def cut_pieces(asking: tuple[int, ...], columns: tuple[Span, ...]) -> tuple[Piece, ...]:
    """Who owns which part of a step's attention output: the rows of a coordinate times a slice.

    Args:
        asking: rows of each coordinate whose queries come here.
        columns: slices of the flattened head-by-dim axis, one for each rank of `RowGroups.columns`.

    Returns:
        The pieces in order of rank in the exchange, the coordinate running fastest; the same objects
        whenever the same is asked, so that a group's plans for them hold.
    """
    borders = list(pairwise(accumulate(asking, initial=0)))
    return tuple(Piece(slice(*rows), its) for its in columns for rows in borders)
