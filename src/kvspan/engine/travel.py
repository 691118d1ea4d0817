"""What travels for prompts, and who multiplies rows: counted as ranks decide it, from the same numbers.

Each rank decides it for itself, in its own process, and tells nobody: to carry it back would be one more
thing that ranks have to agree on, and a simulator has none. So it is computed here once more, while the
ranks are at work (`EngineCore.step`), and no step is the longer for it.

Knows rows, where their requests lie, and bytes. Knows no tensors, and decides nothing.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np

from kvspan.config.resolved import Resolved
from kvspan.config.sizes import DTYPE_BYTES
from kvspan.cost.prefill import PrefillRule, bytes_of_row, bytes_of_token
from kvspan.step import Row
from kvspan.worker.share import Homes, Shares, all_decode


@dataclass(frozen=True, slots=True)
class Travelled:
    """What travels for pieces of prompts in a step, and who multiplies its rows.

    Args:
        num_met: rows for which ranks met in attention.
        num_shared: rows whose new keys PCP coordinates handed round.
        num_keys: rows whose context came to them.
        key_bytes: that a rank sent for that, over all layers.
        num_queries: rows that went to their context.
        query_bytes: that a rank sent for that.
        by_team: whether coordinates multiply all rows of the step together, each with a part of the
            weights.
    """

    num_met: int = 0
    num_shared: int = 0
    num_keys: int = 0
    key_bytes: int = 0
    num_queries: int = 0
    query_bytes: int = 0
    by_team: bool = False


class ContextTravel:
    """Counts for the rows of a step.

    Args:
        resolved: what runs.
    """

    def __init__(self, resolved: Resolved) -> None:
        model, topology, size = resolved.model_config, resolved.topology, DTYPE_BYTES[resolved.dtype]
        self._resolved = resolved
        self._rule = PrefillRule.of(
            resolved.prefill_strategy,
            model,
            topology,
            exchange=resolved.exchange,
            replicate_q=resolved.replicate_q,
            dtype_bytes=size,
        )
        self._homes = Homes.of(resolved, self._rule)
        row = bytes_of_row(model, topology, resolved.exchange, resolved.replicate_q, size)
        self._row_bytes = model.num_layers * row
        self._token_bytes = model.num_layers * bytes_of_token(model, topology, size)

    def of(self, rows: Sequence[Row], pools_of: Callable[[int], Collection[int]]) -> Travelled:
        """What travels for those rows that are pieces of prompts, and whether there is a team.

        Args:
            rows: of the step.
            pools_of: a request -> the pools that have any of its units.
        """
        may_be_team = self._resolved.team_rows.size > 0
        if not may_be_team and all_decode(rows):
            return Travelled()
        homes = self._homes.of_rows(rows, [pools_of(row.request_id) for row in rows])
        by_team = may_be_team and self._makes_a_team(rows, homes)
        if all_decode(rows):
            return Travelled(by_team=by_team)
        has_coordinates = self._resolved.pcp_size > 1
        if self._resolved.dcp_size == 1:  # a rank has its sequences whole
            num_shared = sum(row.num_tokens > 1 for row in rows) * has_coordinates
            return Travelled(num_shared=num_shared, by_team=by_team)
        pieces = [
            row for row, home in zip(rows, homes, strict=True) if home is None and row.num_tokens > 1
        ]
        num_rows = np.array([row.num_tokens for row in pieces], np.int64)
        num_cached = np.array([row.start for row in pieces], np.int64)
        keys, is_fresh = self._rule.gathers(num_rows, num_cached), num_cached == 0
        came, went = keys & ~is_fresh, ~keys & ~is_fresh
        return Travelled(
            num_met=int((~(keys & is_fresh)).sum()),  # fresh keys are on every rank already
            num_shared=len(pieces) * has_coordinates,
            num_keys=int(came.sum()),
            key_bytes=int(num_cached[came].sum()) * self._token_bytes,
            num_queries=int(went.sum()),
            query_bytes=int(num_rows[went].sum()) * self._row_bytes,
            by_team=by_team,
        )

    def _makes_a_team(self, rows: Sequence[Row], homes: Sequence[int | None]) -> bool:
        resolved = self._resolved
        shares = Shares.of(
            rows,
            homes,
            resolved.topology,
            0,  # to each rank it is the same
            num_homes=resolved.num_homes,
            least_tokens=resolved.split_tokens,
            team_rows=resolved.team_rows,
        )
        return bool(shares.team)
