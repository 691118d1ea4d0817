"""When to make keys and values of cached latents, and when to ask the latents. Knows no times.

Multiplications of a head, for n rows of one sequence, with L kv_lora_rank, N nope_dim, P rope_dim and V
value_dim:

    absorbed    for each row and key, L + P for the score and L for the sum of values
    expanded    for each key L * (N + V), once for all rows; then for each row and key N + P and V

Both ways give the same. Ranks decide alike, since n is a number of rows and not of local keys.
"""

import sys

from kvspan.config.mla import MlaConfig

NEVER = sys.maxsize


def least_rows_to_expand(mla: MlaConfig) -> int:
    """Rows of a sequence in a step from which on expanding its latents costs less than asking them.

    Args:
        mla: sizes of latents.

    Returns:
        A number of rows, `NEVER` where latents are no wider than what is made of them.
    """
    absorbed = 2 * mla.kv_lora_rank + mla.rope_dim
    expanded = mla.nope_dim + mla.rope_dim + mla.value_dim
    once = mla.kv_lora_rank * (mla.nope_dim + mla.value_dim)
    return once // (absorbed - expanded) + 1 if absorbed > expanded else NEVER
