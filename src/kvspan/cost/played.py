"""Which steps run with no Python between their calls: as a CUDA graph, or as a tape of native calls.

Calls of a step that is played follow one another; of one that Python runs, each takes longer. The worker
decides by what it has recorded; this says what that will be. Knows no times.
"""

from kvspan.cost.weights import WeightDtypes
from kvspan.cost.work import StepWork

MOST_ROWS = 128
"""Of a step that is recorded: beyond it Python's share of a step is not worth the memory."""


def can_be_played(dtypes: WeightDtypes) -> bool:
    """Whether layers are native calls throughout: of weights in bf16.

    Args:
        dtypes: of the weights.
    """
    return dtypes.linear == "bf16"


def is_played(work: StepWork) -> bool:
    """Whether a step is one that is played where layers can be: a few rows that all decode."""
    return work.only_decodes and work.num_tokens <= MOST_ROWS
