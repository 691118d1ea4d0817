"""How many rows PCP coordinates multiply together, each with a part of the weights. Knows rates.

Coordinates keep the same weights. Each can read all of them for its own rows, or its P-th part for the
rows of all. In the feed-forward part of a layer, for m rows of each:

    alone     longer of (bytes of the weights / bandwidth, products of m rows / operations a second)
    a team    a P-th of what that is for P m rows, and a gather and a reduce-scatter of P m rows

A team pays while reading is what takes longest. How many rows that is is decided once, from sizes and
rates, so that ranks decide alike.
"""

from kvspan.config.model import ModelConfig
from kvspan.cost.choice import Choice
from kvspan.cost.pace import Pace
from kvspan.cost.weights import RankWeights
from kvspan.cost.work import distinct_experts
from kvspan.topology import Topology

MOST_TEAM_ROWS = 256
"""Of a coordinate; multiplying more takes longer than reading weights does on any machine we know."""
_ROW_BYTES = 2
"""Of an element of rows that are gathered: activations are bfloat16."""


def most_team_rows(model: ModelConfig, topology: Topology, pace: Pace, *, weights: RankWeights) -> int:
    """Rows of each coordinate up to which a team pays; 0 = it never does.

    Args:
        model: sizes.
        topology: a legal layout.
        pace: of its ranks.
        weights: that a rank keeps.
    """
    p = topology.pcp_size
    if p == 1:
        return 0

    def gain_s(rows: int) -> float:
        moved_s = rows * (p - 1) * model.hidden_size * _ROW_BYTES / pace.bytes_s
        meetings_s = 2 * model.num_layers * (pace.gather_s + moved_s)
        alone_s, together_s = (_seconds(model, weights, pace, n) for n in (rows, p * rows))
        return alone_s - together_s / p - meetings_s

    return max((rows for rows in range(1, MOST_TEAM_ROWS + 1) if gain_s(rows) > 0), default=0)


def choose_team(
    model: ModelConfig, topology: Topology, pace: Pace, *, weights: RankWeights
) -> Choice[int]:
    """Rows of each coordinate up to which they are a team, and why.

    Args:
        model: sizes.
        topology: a legal layout.
        pace: of its ranks.
        weights: that a rank keeps.
    """
    p = topology.pcp_size
    most = most_team_rows(model, topology, pace, weights=weights)
    if p == 1:
        return Choice(most)
    read_s, meet_s = _seconds(model, weights, pace, 1), 2 * model.num_layers * pace.gather_s
    why = (
        f"reading the weights of feed-forward parts takes a rank {read_s * 1e3:.1f} ms, and meeting "
        f"around them {meet_s * 1e3:.1f} ms"
    )
    if not most:
        return Choice(most, f"{why}: each of {p} coordinates reads them all.")
    return Choice(most, f"{why}: up to {most} rows each, {p} coordinates read a part for everyone.")


def _seconds(model: ModelConfig, weights: RankWeights, pace: Pace, rows: int) -> float:
    """Feed-forward parts of all layers, for some rows on one rank."""
    layers, moe = weights.num_expert_layers, model.moe
    dense = [(m, weights.num_dense_layers) for m in weights.dense]
    dense += [(m, layers) for m in weights.shared]
    read = sum(m.num_bytes * times for m, times in dense)
    products = float(sum(m.params * rows * times for m, times in dense))
    if moe is not None:
        here = layers * weights.num_experts / moe.num_experts  # times a visit that may go elsewhere
        chosen = distinct_experts(
            moe.num_experts, experts_per_token=moe.experts_per_token, num_tokens=rows
        )
        read += sum(m.num_bytes for m in weights.expert) * chosen * here
        visits = rows * moe.experts_per_token * here
        products += sum(m.params for m in weights.expert) * visits
    return max(read / pace.read_bytes_s, 2 * products / pace.flops)
