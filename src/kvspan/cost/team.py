"""How many rows PCP coordinates multiply together, each with a part of the weights. Knows rates.

Coordinates keep the same weights. Each can read all of them for its own rows, or its P-th part for the
rows of all. In the feed-forward part of a layer, for m rows of each:

    alone     longer of (bytes of the weights / bandwidth, products of m rows / operations a second)
    a team    a P-th of what that is for P m rows, and a gather and a reduce-scatter of P m rows

A team pays while reading is what takes longest. Of experts it reads parts of those that the rows of all
go to, so that it pays from some rows on, when coordinates would read many of the same. With how many it
does is decided once, from sizes and rates: ranks decide alike.
"""

from dataclasses import dataclass

from kvspan.config.model import ModelConfig
from kvspan.cost.choice import Choice
from kvspan.cost.facts import Device
from kvspan.cost.pace import Pace
from kvspan.cost.weights import RankWeights
from kvspan.cost.work import distinct_experts
from kvspan.topology import Span, Topology

MOST_TEAM_ROWS = 256
"""Of a coordinate; multiplying more takes longer than reading weights does on any machine we know."""
NO_TEAM = Span(0, 0)
_ROW_BYTES = 2
"""Of an element of rows that are gathered: activations are bfloat16."""


@dataclass(frozen=True, slots=True)
class TeamCost:
    """What feed-forward parts cost coordinates, alone and as a team.

    Args:
        model: sizes.
        topology: a legal layout.
        weights: that a rank keeps.
        pace: of its ranks.
        device: whose collectives are looked up by their size; None = they follow from the pace.
    """

    model: ModelConfig
    topology: Topology
    weights: RankWeights
    pace: Pace
    device: Device | None = None

    def rows(self) -> Span:
        """Rows of a coordinate, of the one that has most, with which a team pays; none = never."""
        if self.topology.pcp_size == 1:
            return NO_TEAM
        paying = [rows for rows in range(1, MOST_TEAM_ROWS + 1) if self.gain_s(rows) > 0]
        return Span(paying[0], paying[-1] + 1) if paying else NO_TEAM

    def gain_s(self, rows: int) -> float:
        """Seconds that a team saves a step with so many rows at each coordinate; may be under 0."""
        p = self.topology.pcp_size
        return self.alone_s(rows) - self.alone_s(p * rows) / p - self.meetings_s(rows)

    def meetings_s(self, rows: int) -> float:
        """What gathers and reduce-scatters of all layers take, for so many rows of each coordinate."""
        p, layers = self.topology.pcp_size, self.model.num_layers
        whole = p * rows * self.model.hidden_size * _ROW_BYTES
        if self.device is not None:
            met = (self.device.collective_s(op, whole, num_ranks=p) for op in ("ag", "rs"))
            return layers * sum(met)
        return 2 * layers * (self.pace.gather_s + whole * (p - 1) / p / self.pace.bytes_s)

    def alone_s(self, rows: int) -> float:
        """Feed-forward parts of all layers, of some rows on a rank that reads all it keeps of them."""
        weights, moe = self.weights, self.model.moe
        layers = weights.num_expert_layers
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
        return max(read / self.pace.read_bytes_s, 2 * products / self.pace.flops)


def choose_team(cost: TeamCost) -> Choice[Span]:
    """Rows of a coordinate with which they are a team, and why."""
    p, rows = cost.topology.pcp_size, cost.rows()
    if p == 1:
        return Choice(rows)
    why = (
        f"a rank reads its feed-forward weights in {cost.alone_s(1) * 1e3:.1f} ms for one row, and "
        f"meeting around them takes {cost.meetings_s(1) * 1e3:.1f} ms"
    )
    if not rows.size:
        return Choice(rows, f"{why}: each of {p} coordinates reads for itself.")
    return Choice(
        rows,
        f"{why}: with {rows.start} to {rows.stop - 1} rows, {p} coordinates read a part for everyone.",
    )
