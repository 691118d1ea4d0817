"""Bytes that a rank sends in the collectives of attention. Pure arithmetic; knows no times.

Legend: H / A query heads of a DCP group, D head_dim, W dcp_size. "Row" is a query token in one layer.
"""

from kvspan.topology import Span, cut

LSE_BYTES = 4
"""A log-sum-exp is float32."""
SUM_BYTES = 4
"""Partial results are summed in float32."""


def a2a_bytes_per_row(*, num_heads: int, head_dim: int, dcp_size: int, dtype_bytes: int) -> int:
    """Bytes of the all-to-all: to every other rank its piece of the partials, with its LSEs.

    Args:
        num_heads: H / A.
        head_dim: D.
        dcp_size: W.
        dtype_bytes: bytes of an element of the partials.

    Returns:
        What the rank sends that sends most; pieces may differ.
    """
    pieces = [cut(num_heads * head_dim, parts=dcp_size, index=i) for i in range(dcp_size)]
    sizes = [p.size * dtype_bytes + _touched_heads(p, head_dim) * LSE_BYTES for p in pieces]
    return sum(sizes) - min(sizes)


def ag_rs_bytes_per_row(*, num_heads: int, head_dim: int, dcp_size: int) -> int:
    """Bytes of the all-gather of all LSEs and the reduce-scatter of the rescaled float32 partials.

    Each goes round a ring: W - 1 times the gathered part, and W - 1 of W parts of the sum.

    Args:
        num_heads: H / A.
        head_dim: D.
        dcp_size: W.

    Returns:
        What the rank sends that sends most.
    """
    pieces = [cut(num_heads * head_dim, parts=dcp_size, index=i).size for i in range(dcp_size)]
    return (dcp_size - 1) * num_heads * LSE_BYTES + (sum(pieces) - min(pieces)) * SUM_BYTES


def query_gather_bytes_per_row(*, num_heads: int, head_dim: int, dcp_size: int, dtype_bytes: int) -> int:
    """Bytes of gathering the queries of a DCP group, of which each rank projects its W-th part.

    Args:
        num_heads: H / A.
        head_dim: D.
        dcp_size: W.
        dtype_bytes: bytes of an element of the queries.

    Returns:
        What the rank sends that sends most, round a ring.
    """
    pieces = [cut(num_heads * head_dim, parts=dcp_size, index=i).size for i in range(dcp_size)]
    return (sum(pieces) - min(pieces)) * dtype_bytes


def _touched_heads(piece: Span, head_dim: int) -> int:
    """Heads of which a piece has a part."""
    return -(-piece.stop // head_dim) - piece.start // head_dim if piece.size else 0
