"""Choices that are made by time, where there are facts of the machine: the planner's own step times.

A choice must do for all steps of a deployment, so it is made for a usual request: its prompt computed in
chunks, then so many tokens, each in a step that others share. Knows no loads but that one.
"""

from dataclasses import dataclass, replace

from kvspan.config.model import ModelConfig
from kvspan.cost.deployment import Deployment
from kvspan.cost.facts import Device
from kvspan.cost.steptime import StepCost
from kvspan.cost.weights import WeightDtypes
from kvspan.cost.work import StepWork, decode_work
from kvspan.topology import Topology

USUAL_INPUT, USUAL_OUTPUT = 8192, 512
"""Tokens of a request whose lengths nobody named."""
USUAL_BATCH = 64
"""Requests that share a step of the usual request."""
_CHUNK = 2048


@dataclass(frozen=True, slots=True)
class Timed:
    """Times of one layout under different choices.

    Args:
        deployment: the layout; its choices are replaced by those asked about.
    """

    deployment: Deployment

    @classmethod
    def of(
        cls, model: ModelConfig, device: Device, topology: Topology, *, kv_dtype_bytes: int
    ) -> "Timed":
        """Times of a layout.

        Args:
            model: sizes; its weights count as bfloat16, which is what they are computed in.
            device: facts of the machine.
            topology: a legal layout.
            kv_dtype_bytes: bytes of a cached element.
        """
        return cls(
            Deployment(
                model=model,
                device=device,
                topology=topology,
                dtypes=WeightDtypes(),
                kv_dtype_bytes=kv_dtype_bytes,
            )
        )

    @property
    def device(self) -> Device:
        """The facts."""
        return self.deployment.device

    @property
    def kv_bytes_s(self) -> float:
        """Bytes of the cache that a rank reads in a second."""
        return self.device.rates_of(self.deployment.topology.world_size).kv_gbs * 1e9

    def exchange_s(self, exchange: str, num_rows: int = USUAL_BATCH) -> float:
        """Seconds in which partial results of a layer meet.

        Args:
            exchange: `a2a` or `ag_rs`.
            num_rows: of the step.
        """
        cost = StepCost(replace(self.deployment, exchange=exchange))
        return cost.exchange_s(num_rows, latent=self.deployment.model.mla is not None)

    def request_s(self, *, exchange: str, replicate_q: bool) -> float:
        """Seconds of the ranks that the usual request takes.

        Args:
            exchange: `a2a` or `ag_rs`.
            replicate_q: whether each rank projects all queries of its DCP group.
        """
        cost = StepCost(replace(self.deployment, exchange=exchange, replicate_q=replicate_q))
        chunks = [
            StepWork.of([(start, _CHUNK)], num_sampled=0, ways=cost.ways)
            for start in range(0, USUAL_INPUT, _CHUNK)
        ]
        decode = decode_work(USUAL_INPUT + USUAL_OUTPUT / 2, batch=USUAL_BATCH)
        return sum(map(cost.step_s, chunks)) + USUAL_OUTPUT * cost.step_s(decode) / USUAL_BATCH
