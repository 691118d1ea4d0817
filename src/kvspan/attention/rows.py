"""How rows that PCP coordinates share out meet in attention. Knows counts of rows; knows no requests.

Every coordinate works on its own rows through the whole network. A row has a **reach**: how far its
query travels, and who exchanges what it sees.

    local     all its keys are at its home: with W = 1, and of a request whose blocks all are
    spread    its keys are all over the DCP group: its query goes to every coordinate of it

New keys of rows that others may ask too are gathered over the coordinates, in their order, before the
cache is written; those of a request that has one coordinate for a home stay there. One coordinate is an
ordinary value. A home may also be a rank of the group (`RowGroups.home` is then that rank alone): it
makes the queries and the output of its local rows for all heads of the group, and nobody else has to do
with them.
"""

from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Self

from kvspan.attention.exchange import Exchange, make_exchange
from kvspan.comm.group import Group, Piece, World
from kvspan.comm.local import solo
from kvspan.topology import Span, Topology, cuts


@dataclass(frozen=True, slots=True)
class RowGroups:
    """Who works on other rows, and who on the same.

    Args:
        pcp: ranks with the same weights that work on other rows, in order of their coordinate.
        columns: ranks that share the query columns of the same rows: a part of the DCP group.
        home: those of them that share the columns of local rows: all, or a rank that is a home itself.
        vocabulary: all ranks, those with the same part of the head side by side.
    """

    pcp: Group
    columns: Group
    home: Group
    vocabulary: Group

    @classmethod
    def of(cls, world: World, topology: Topology, dcp: Group, *, ranks_are_homes: bool) -> Self:
        """This rank's; a collective, since groups are made.

        Args:
            world: all ranks.
            topology: the grid of ranks.
            dcp: the DCP group, which `columns` mostly is.
            ranks_are_homes: whether each rank is a home of its own.
        """
        same = topology.column_groups() == topology.dcp_groups()
        pcp = world.group(topology.pcp_groups())
        columns = dcp if same else world.group(topology.column_groups())
        return cls(
            pcp=pcp,
            columns=columns,
            home=solo() if ranks_are_homes else columns,
            vocabulary=world.group(topology.vocabulary_groups()),
        )


@dataclass(frozen=True, slots=True)
class Reach:
    """How rows of one kind come by what they see.

    Args:
        group: ranks over which their queries are gathered.
        exchange: how partial results meet.
        slices: of the flattened head-by-dim axis, what each rank that shares its columns ends with.
        own: this rank's place among them.
    """

    group: Group
    exchange: Exchange
    slices: tuple[Span, ...]
    own: int

    @property
    def slice(self) -> Span:
        """What this rank ends with."""
        return self.slices[self.own]


def make_reaches(name: str, groups: RowGroups, dcp: Group, *, width: int) -> tuple[Reach, Reach]:
    """The reaches of rows: spread, and local. What is kept for local rows is enough for all.

    Args:
        name: the exchange, `a2a` or `ag_rs`.
        groups: who works on other rows, and who on the same.
        dcp: ranks that share sequences.
        width: of the flattened head-by-dim axis of the group's output.
    """

    def reach(over: Group, exchanging: Group, sharing: Group) -> Reach:
        slices = tuple(cuts(width, parts=sharing.size))
        return Reach(over, make_exchange(name, exchanging), slices, sharing.rank)

    return reach(groups.pcp, dcp, groups.columns), reach(solo(), groups.home, groups.home)


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
