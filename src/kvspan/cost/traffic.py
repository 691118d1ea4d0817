"""Bytes that a rank sends in the collectives of attention. Pure arithmetic; knows no times.

Legend: H / A query heads of a DCP group, D head_dim, W dcp_size. "Row" is a query token in one layer.
"""

from kvspan.topology import Span, cuts, touched_heads

LSE_BYTES = 4
"""A log-sum-exp is float32."""
SUM_BYTES = 4
"""Partial results are summed in float32."""


def a2a_bytes_per_row(
    *, num_heads: int, head_dim: int, dcp_size: int, dtype_bytes: int, latent_dim: int | None = None
) -> int:
    """Bytes of the all-to-all: to every other rank its piece of the partials, with its LSEs.

    Args:
        num_heads: H / A.
        head_dim: D.
        dcp_size: W.
        dtype_bytes: bytes of an element of the partials.
        latent_dim: elements of a head's partial, where it must come whole: with latent attention, a
            head's output is made from all of them. None = a piece travels as it is.

    Returns:
        What the rank sends that sends most; pieces may differ.
    """
    pieces = cuts(num_heads * head_dim, parts=dcp_size)
    heads = [touched_heads(piece, head_dim).size for piece in pieces]
    widths = _widths(pieces, head_dim, latent_dim)
    sizes = [w * dtype_bytes + h * LSE_BYTES for w, h in zip(widths, heads, strict=True)]
    return sum(sizes) - min(sizes)


def ag_rs_bytes_per_row(
    *, num_heads: int, head_dim: int, dcp_size: int, latent_dim: int | None = None
) -> int:
    """Bytes of the all-gather of all LSEs and the reduce-scatter of the rescaled float32 partials.

    Each goes round a ring: W - 1 times the gathered part, and W - 1 of W parts of the sum.

    Args:
        num_heads: H / A.
        head_dim: D.
        dcp_size: W.
        latent_dim: see `a2a_bytes_per_row`.

    Returns:
        What the rank sends that sends most.
    """
    widths = _widths(cuts(num_heads * head_dim, parts=dcp_size), head_dim, latent_dim)
    return (dcp_size - 1) * num_heads * LSE_BYTES + (sum(widths) - min(widths)) * SUM_BYTES


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
    sizes = [piece.size for piece in cuts(num_heads * head_dim, parts=dcp_size)]
    return (sum(sizes) - min(sizes)) * dtype_bytes


def key_gather_bytes_per_token(
    *, num_kv_heads: int, cached_dim: int, dcp_size: int, dtype_bytes: int
) -> int:
    """Bytes of gathering what is cached of a token, on average over ranks, of which one has it.

    Args:
        num_kv_heads: KV heads that a rank keeps.
        cached_dim: elements cached for a token and KV head.
        dcp_size: W.
        dtype_bytes: bytes of an element as kernels see it.

    Returns:
        What a rank sends, round a ring, rounded up.
    """
    return -(-num_kv_heads * cached_dim * dtype_bytes * (dcp_size - 1) // dcp_size)


def _widths(pieces: list[Span], head_dim: int, latent_dim: int | None) -> list[int]:
    """Elements that travel for each piece."""
    if latent_dim is None:
        return [piece.size for piece in pieces]
    return [touched_heads(piece, head_dim).size * latent_dim for piece in pieces]
