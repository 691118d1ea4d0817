"""How rows that PCP coordinates share out meet in attention. Knows counts of rows; knows no requests.

Every coordinate works on its own rows through the whole network. In attention its new keys reach all
coordinates, and its queries reach those that hold keys which they do not hold themselves:

    W = 1    every coordinate keeps all keys          a rank answers its own queries alone
    W > 1    the cache is spread over coordinates     a rank answers everybody's queries over its keys

Rows of several coordinates stand in order of the coordinate. One coordinate is an ordinary value.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Self

from torch import Tensor

from kvspan.comm.group import Group, Piece, World
from kvspan.topology import Span, Topology


@dataclass(frozen=True, slots=True)
class RowGroups:
    """Who works on other rows, and who on the same.

    Args:
        pcp: ranks with the same weights that work on other rows, in order of their coordinate.
        asking: those of them whose queries this rank answers.
        columns: ranks that share the query columns of the same rows: a part of the DCP group.
    """

    pcp: Group
    asking: Group
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
            asking=world.group(topology.asking_groups()),
            columns=dcp if same else world.group(topology.column_groups()),
        )


def gather_rows(group: Group, sizes: Sequence[int], *tensors: Tensor) -> list[Tensor]:
    """Puts everybody's rows one below the other.

    Args:
        group: who has the others.
        sizes: rows of each rank of the group.
        tensors: [sizes[rank], ...], this rank's rows.

    Returns:
        [sum of sizes, ...] of each, on every rank.
    """
    under_way = [group.all_gather(x.contiguous(), sizes) for x in tensors]
    return [pending.wait() for pending in under_way]


@lru_cache(maxsize=256)
def cut_pieces(asking: tuple[int, ...], columns: tuple[Span, ...]) -> tuple[Piece, ...]:
    """Who owns which part of a step's attention output: the rows of a coordinate times a slice.

    Args:
        asking: rows of each coordinate that asks.
        columns: slices of the flattened head-by-dim axis, one for each rank of `RowGroups.columns`.

    Returns:
        The pieces in order of `dcp_rank`, in which the coordinate runs fastest; the same objects
        whenever the same is asked, so that a group's plans for them hold.
    """
    borders = list(pairwise(accumulate(asking, initial=0)))
    return tuple(Piece(slice(*rows), its) for its in columns for rows in borders)
