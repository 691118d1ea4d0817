"""Ranks, groups and heads: who works with whom on what. Knows no tensors and no processes.

Legend:
    T tp_size   ranks that share FFN, embedding and head
    W dcp_size  ranks over which each sequence's KV is spread
    P pcp_size  ranks over which rows are spread
    A attention_tp_size = T / max(1, W / P): ranks that share attention heads

    rank = ((dp * PP + pp) * P + pcp) * T + tp, with DP = PP = 1 here (one replica, no pipeline)

DCP adds no ranks: it regroups them. The ranks of a DCP group hold the same KV heads, each for its own
share of every sequence.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice

from kvspan.errors import LayoutError

PIECE_UNIT = 8
"""Pieces of a dim are cut in multiples of this many elements (one vector register of bf16)."""


class LayoutMode(StrEnum):
    """What DCP does with the KV heads of a layout."""

    NONE = "none"
    """W = 1: every rank keeps whole sequences of its own heads."""
    COPIES = "copies"
    """A >= Hkv: DCP shares out the sequence where TP alone would keep copies of one KV head."""
    DECOUPLED = "decoupled"
    """A < Hkv: a rank keeps several KV heads, for its share of the sequence."""


@dataclass(frozen=True, slots=True)
class Heads:
    """Query and KV heads of a model's attention.

    Args:
        num_heads: H, query heads.
        num_kv_heads: heads that the KV cache stores: Hkv, and 1 for MLA whatever its config says.
    """

    num_heads: int
    num_kv_heads: int


@dataclass(frozen=True, slots=True)
class Span:
    """A half-open range of a dim or of heads."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        """Elements in the range."""
        return self.stop - self.start

    def __contains__(self, number: int) -> bool:
        """Whether a number lies in the range."""
        return self.start <= number < self.stop

    def shifted(self, by: int) -> "Span":
        """The range of the same size that begins `by` elements later."""
        return Span(self.start + by, self.stop + by)


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """The grid of ranks of one replica.

    Args:
        tp_size: T.
        dcp_size: W; 1 is an ordinary value.
        pcp_size: P; 1 is an ordinary value.
    """

    tp_size: int = 1
    dcp_size: int = 1
    pcp_size: int = 1

    @property
    def flags(self) -> str:
        """The layout as a user types it."""
        pcp = f" -pcp {self.pcp_size}" if self.pcp_size > 1 else ""
        return f"-tp {self.tp_size} -dcp {self.dcp_size}{pcp}"

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.pcp_size * self.tp_size

    @property
    def tp_ranks_per_dcp(self) -> int:
        """Consecutive TP ranks in one DCP group: max(1, W / P)."""
        return max(1, self.dcp_size // self.pcp_size)

    @property
    def attention_tp_size(self) -> int:
        """A: ways in which attention heads are split."""
        return self.tp_size // self.tp_ranks_per_dcp

    def tp_groups(self) -> list[tuple[int, ...]]:
        """Ranks that share FFN, embedding and head."""
        t = self.tp_size
        return [tuple(range(p * t, (p + 1) * t)) for p in range(self.pcp_size)]

    def pcp_groups(self) -> list[tuple[int, ...]]:
        """Ranks that hold the same weights and work on different rows."""
        t = self.tp_size
        return [tuple(p * t + i for p in range(self.pcp_size)) for i in range(t)]

    def vocabulary_groups(self) -> list[tuple[int, ...]]:
        """All ranks, those with the same part of embedding and head side by side."""
        t = self.tp_size
        return [tuple(p * t + i for i in range(t) for p in range(self.pcp_size))]

    def dcp_groups(self) -> list[tuple[int, ...]]:
        """Ranks that share sequences, in order of their `dcp_rank`: the PCP axis runs fastest.

        The order is not ascending by rank when P > 1.
        """
        if self.dcp_size == 1:
            return [(rank,) for rank in range(self.world_size)]
        t, width = self.tp_size, self.tp_ranks_per_dcp
        return [
            tuple(p * t + tp for tp in range(a, a + width) for p in range(self.pcp_size))
            for a in range(0, t, width)
        ]

    def column_groups(self) -> list[tuple[int, ...]]:
        """Ranks that share the query columns of the same rows: a DCP group inside one PCP coordinate."""
        t, width = self.tp_size, self.tp_ranks_per_dcp
        return [
            tuple(range(p * t + a, p * t + a + width))
            for p in range(self.pcp_size)
            for a in range(0, t, width)
        ]

    def tp_rank(self, rank: int) -> int:
        """Place of `rank` among the ranks that share the FFN."""
        return rank % self.tp_size

    def pcp_rank(self, rank: int) -> int:
        """Place of `rank` among the ranks that share rows."""
        return rank // self.tp_size

    def attention_tp_rank(self, rank: int) -> int:
        """Which A-th part of the heads `rank` works on."""
        return self.tp_rank(rank) // self.tp_ranks_per_dcp

    def dcp_group(self, rank: int) -> tuple[int, ...]:
        """The DCP group of `rank`, in order of `dcp_rank`."""
        return next(group for group in self.dcp_groups() if rank in group)

    def dcp_rank(self, rank: int) -> int:
        """Which W-th share of every sequence `rank` keeps."""
        return self.dcp_group(rank).index(rank)

    def query_heads(self, rank: int, heads: Heads) -> Span:
        """Query heads of `rank`'s DCP group, H / A of them."""
        per_group = heads.num_heads // self.attention_tp_size
        first = self.attention_tp_rank(rank) * per_group
        return Span(first, first + per_group)

    def kv_heads(self, rank: int, heads: Heads) -> Span:
        """KV heads that `rank` keeps: Hkv / A of them, or one that its neighbours keep too."""
        first = self.attention_tp_rank(rank) * heads.num_kv_heads // self.attention_tp_size
        return Span(first, first + max(heads.num_kv_heads // self.attention_tp_size, 1))


def cut(size: int, *, parts: int, index: int, unit: int = PIECE_UNIT) -> Span:
    """The `index`-th of `parts` pieces of a dim, balanced to one `unit`.

    `size` need be a multiple neither of `parts` nor of `unit`: pieces differ by at most one unit and
    the last piece ends at `size`. With fewer units than parts some pieces are empty.
    """
    units = -(-size // unit)
    start, stop = (min(size, unit * (units * i // parts)) for i in (index, index + 1))
    return Span(start, stop)


def cuts(size: int, *, parts: int) -> list[Span]:
    """All the pieces that `cut` makes of a dim, in order."""
    return [cut(size, parts=parts, index=i) for i in range(parts)]


def touched_heads(columns: Span, head_dim: int) -> Span:
    """Heads of which a range of the flattened head-by-dim axis has a part; none if it is empty."""
    first = columns.start // head_dim
    return Span(first, -(-columns.stop // head_dim) if columns.size else first)


def check_layout(topology: Topology, heads: Heads) -> LayoutMode:
    """Says what DCP does in a layout, or why the layout cannot be.

    Raises:
        LayoutError: one sentence with the numbers, and the nearest layouts that fit.
    """
    if (broken := _broken_rule(topology, heads)) is not None:
        reason, sentence = broken
        raise LayoutError(sentence, reason=reason, fits=legal_layouts(topology, heads))
    if topology.dcp_size == 1:
        return LayoutMode.NONE
    if topology.attention_tp_size >= heads.num_kv_heads:
        return LayoutMode.COPIES
    return LayoutMode.DECOUPLED


def legal_layouts(near: Topology, heads: Heads) -> list[str]:
    """Layouts that `heads` allow, nearest first: the same TP size, then smaller and larger ones."""
    tp_size, pcp_size = max(near.tp_size, 1), max(near.pcp_size, 1)

    def fits(tp_size: int) -> Iterator[Topology]:
        for dcp_size in range(1, pcp_size * tp_size + 1):
            t = Topology(tp_size=tp_size, dcp_size=dcp_size, pcp_size=pcp_size)
            if _broken_rule(t, heads) is None:
                yield t

    sizes = sorted(range(1, tp_size + 3), key=lambda t: (abs(t - tp_size), t))
    found = islice((t for size in sizes for t in fits(size)), 6)
    return [t.flags for t in found]


def _broken_rule(topology: Topology, heads: Heads) -> tuple[str, str] | None:
    """The first rule that a layout breaks, as (reason, sentence)."""
    t, w, p = topology.tp_size, topology.dcp_size, topology.pcp_size
    if min(t, w, p) < 1:
        return "size_below_one", f"Parallel sizes must be at least 1: got TP {t}, DCP {w}, PCP {p}."
    if w > 1 and w % p:
        return (
            "dcp_not_multiple_of_pcp",
            f"--decode-context-parallel-size {w} is neither 1 nor a multiple of "
            f"--prefill-context-parallel-size {p}.",
        )
    if t % topology.tp_ranks_per_dcp:
        return (
            "tp_not_divisible_by_dcp",
            f"--decode-context-parallel-size {w} takes {topology.tp_ranks_per_dcp} TP ranks to a "
            f"group, which does not divide --tensor-parallel-size {t}.",
        )
    a, h, kv = topology.attention_tp_size, heads.num_heads, heads.num_kv_heads
    if h % a:
        return (
            "heads_not_divisible_by_attention_tp",
            f"{h} attention heads do not divide over {a} attention-TP ranks "
            f"(--tensor-parallel-size {t} / {topology.tp_ranks_per_dcp} by DCP).",
        )
    if kv % a and a % kv:
        return (
            "group_straddles_kv_heads",
            f"{kv} KV heads and {a} attention-TP ranks (--tensor-parallel-size {t} / "
            f"{topology.tp_ranks_per_dcp} by DCP): neither divides the other, so ranks of one DCP "
            "group would need different KV heads.",
        )
    return None
