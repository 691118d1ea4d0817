"""Every layout of some GPUs: which are legal, what each holds and how fast it is, and which is best.

Legal is what `topology.check_layout` lets through, fitting what `plan.capacity` does; what is refused is
kept with its reason. Knows no printing.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvspan.config.sizes import KV_DTYPE_BYTES
from kvspan.cost.deployment import Deployment
from kvspan.cost.exchanges import check_exchange
from kvspan.cost.facts import Device
from kvspan.cost.memory import kv_bytes_per_token
from kvspan.cost.steptime import StepCost
from kvspan.cost.timed import USUAL_INPUT
from kvspan.cost.weights import WeightDtypes, weight_dtypes
from kvspan.errors import ConfigError
from kvspan.layout import CacheLayout
from kvspan.plan.asked import PlanAsked
from kvspan.plan.capacity import Capacity, capacity_of, check_capacity
from kvspan.plan.load import Load
from kvspan.plan.models import FoundModel
from kvspan.plan.steady import Limits, Steady, requests_with_room, steady_state
from kvspan.topology import Topology, check_layout

MAX_CONCURRENCY = 4096
"""Of a sweep whose end nobody named."""
APART = "on several machines, over which kvspan starts no ranks"


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A way to use the GPUs.

    Args:
        replicas: DP, each of `topology.world_size` ranks.
        topology: of a replica.
        interleave: I.
        replicate_q: whether each rank projects all queries of its DCP group.
        exchange: how partial results meet.
    """

    replicas: int
    topology: Topology
    interleave: int
    replicate_q: bool
    exchange: str

    @property
    def layout(self) -> str:
        """The layout as flags."""
        t = self.topology
        flags = f"-tp {t.tp_size} -dcp {t.dcp_size}"
        return (
            flags
            + (f" -pcp {t.pcp_size}" if t.pcp_size > 1 else "")
            + (f" -dp {self.replicas}" if self.replicas > 1 else "")
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """What all replicas together do for some users.

    Args:
        concurrency: users of all replicas.
        steady: of each replica.
        output_tok_s_gpu: tokens of output a second and GPU.
        total_tok_s_gpu: tokens of prompt and output a second and GPU, cached ones among them.
        meets: whether times are within what was asked.
    """

    concurrency: int
    steady: Steady
    output_tok_s_gpu: float
    total_tok_s_gpu: float
    meets: bool

    @property
    def tok_s_user(self) -> float:
        """Tokens a second that a user sees while the answer comes."""
        return 1 / self.steady.tpot_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A candidate that is legal and fits.

    Args:
        candidate: which.
        cost: of its steps.
        capacity: of a replica.
        room: requests that all replicas hold at once.
        points: by concurrency, ascending.
        best: of them by the goal, among those that meet what was asked; None = none does.
    """

    candidate: Candidate
    cost: StepCost
    capacity: Capacity
    room: int
    points: tuple[Point, ...]
    best: Point | None


@dataclass(frozen=True, slots=True)
class Refused:
    """A layout that cannot be.

    Args:
        layout: as flags.
        why: a sentence.
    """

    layout: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The answer.

    Args:
        asked: the question.
        model: whose weights.
        device: on which.
        dtypes: of the weights.
        load: every request.
        kv_bytes_per_token: of one copy of the cache.
        planned: what fits, best first.
        refused: what does not.
        ways_out: if nothing fits, what would.
    """

    asked: PlanAsked
    model: FoundModel
    device: Device
    dtypes: WeightDtypes
    load: Load
    kv_bytes_per_token: int
    planned: tuple[Planned, ...]
    refused: tuple[Refused, ...]
    ways_out: tuple[str, ...] = ()

    def hosts_of_replica(self, planned: Planned) -> int:
        """Machines over which a replica of a candidate stretches; kvspan's ranks are of one."""
        return -(-planned.candidate.topology.world_size // self.device.host_ranks)

    def replicas_of_host(self, planned: Planned) -> int:
        """Replicas behind one server: those of one machine."""
        ranks = planned.candidate.topology.world_size
        return min(planned.candidate.replicas, max(self.device.host_ranks // ranks, 1))

    def max_model_len(self, planned: Planned) -> int:
        """Tokens of the longest request that a candidate takes: as asked, or what it has room for."""
        positions = self.model.config.max_position_embeddings
        return self.asked.max_model_len or min(positions, planned.capacity.tokens)

    @property
    def front(self) -> list[tuple[Planned, Point]]:
        """Points that no other beats in both tokens a GPU and tokens a user, by the former."""
        points = [(planned, point) for planned in self.planned for point in planned.points]
        points.sort(key=lambda p: (-p[1].output_tok_s_gpu, -p[1].tok_s_user))
        front: list[tuple[Planned, Point]] = []
        for planned, point in points:
            if not front or point.tok_s_user > front[-1][1].tok_s_user:
                front.append((planned, point))
        return front


def search(asked: PlanAsked, model: FoundModel, device: Device) -> Plan:
    """Tries every layout.

    Args:
        asked: the question.
        model: whose weights.
        device: on which.

    Raises:
        ConfigError: what was asked cannot be for this model.
    """
    load = load_of(asked, model)
    dtypes = weight_dtypes(asked.weights_dtype, model.raw, model.config)
    planned, refused = _try_all(asked, model, device, dtypes, load)
    planned.sort(key=lambda p: _rank(asked, p), reverse=True)
    return Plan(
        asked=asked,
        model=model,
        device=device,
        dtypes=dtypes,
        load=load,
        kv_bytes_per_token=kv_bytes_per_token(
            model.config, kv_dtype_bytes=KV_DTYPE_BYTES[asked.kv_cache_dtype]
        ),
        planned=tuple(planned),
        refused=tuple(refused),
        ways_out=() if planned else _ways_out(asked, model, device, load),
    )


def load_of(asked: PlanAsked, model: FoundModel) -> Load:
    """The mean request that was asked about.

    Raises:
        ConfigError: it is longer than the model's context, or shorter than what is new in it.
    """
    limit = asked.max_model_len or model.config.max_position_embeddings
    usual = max(min(USUAL_INPUT, limit - asked.output), 1)
    prompt = usual if asked.input is None else asked.input
    if prompt + asked.output > limit:
        raise ConfigError(
            f"--input {prompt} and --output {asked.output} are over the {limit} tokens of the "
            "model's context: lower them, or raise --max-model-len if the model is to be stretched."
        )
    if asked.new_tokens is not None and asked.new_tokens > prompt:
        raise ConfigError(f"--new-tokens {asked.new_tokens} is over --input {prompt}: lower it.")
    shared = int(asked.shared_prefix * prompt)
    new = prompt - shared if asked.new_tokens is None else asked.new_tokens
    kept = max(prompt - shared - new, 0)
    return Load(input_tokens=prompt, output_tokens=asked.output, shared_tokens=shared, kept_tokens=kept)


def deployment_of(
    asked: PlanAsked,
    model: FoundModel,
    device: Device,
    candidate: Candidate,
    dtypes: WeightDtypes,
) -> Deployment:
    """A candidate as what the cost model takes."""
    return Deployment(
        model=model.config,
        device=device,
        topology=candidate.topology,
        dtypes=dtypes,
        kv_dtype_bytes=KV_DTYPE_BYTES[asked.kv_cache_dtype],
        exchange=candidate.exchange,
        replicate_q=candidate.replicate_q,
        expert_parallel=asked.enable_expert_parallel,
    )


def _try_all(
    asked: PlanAsked, model: FoundModel, device: Device, dtypes: WeightDtypes, load: Load
) -> tuple[list[Planned], list[Refused]]:
    planned: list[Planned] = []
    refused: dict[str, Refused] = {}
    for candidate in _candidates(asked, device):
        try:
            planned.append(_planned(asked, model, device, candidate, dtypes, load))
        except ConfigError as error:
            parts = (candidate.layout, f"--dcp-comm-backend {candidate.exchange}")
            layout = " ".join(parts) if "--dcp-comm-backend" in str(error) else candidate.layout
            refused.setdefault(layout, Refused(layout, str(error)))
    return planned, list(refused.values())


def _candidates(asked: PlanAsked, device: Device) -> Iterator[Candidate]:
    """Everything to try, legal or not; a replica spans two domains of links at the most."""
    for world in _divisors(asked.gpus):
        if world > 2 * device.link_domain:
            continue
        for tp_size in _divisors(world):
            for dcp_size in _divisors(world):
                topology = Topology(tp_size=tp_size, dcp_size=dcp_size, pcp_size=world // tp_size)
                spread = dcp_size > 1
                for interleave in (asked.block_size, 1) if spread else (asked.block_size,):
                    for replicate_q in (False, True) if spread else (False,):
                        for exchange in ("a2a", "ag_rs") if spread else ("a2a",):
                            yield Candidate(
                                replicas=asked.gpus // world,
                                topology=topology,
                                interleave=interleave,
                                replicate_q=replicate_q,
                                exchange=exchange,
                            )


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, min(number, 4096) + 1) if number % d == 0]


def _planned(
    asked: PlanAsked,
    model: FoundModel,
    device: Device,
    candidate: Candidate,
    dtypes: WeightDtypes,
    load: Load,
) -> Planned:
    """What a candidate does, or why it cannot be."""
    check_layout(candidate.topology, model.config.heads)
    check_exchange(candidate.exchange, model.config, candidate.topology)
    layout = CacheLayout(
        block_size=asked.block_size,
        dcp_size=candidate.topology.dcp_size,
        interleave=candidate.interleave,
    )
    cost = StepCost(deployment_of(asked, model, device, candidate, dtypes))
    capacity = capacity_of(cost, layout, fraction=asked.gpu_memory_utilization)
    check_capacity(capacity, layout, request_tokens=load.input_tokens + load.output_tokens)
    points = tuple(_points(asked, cost, capacity, load, candidate))
    meeting = [point for point in points if point.meets]
    return Planned(
        candidate=candidate,
        cost=cost,
        capacity=capacity,
        room=requests_with_room(capacity, load) * candidate.replicas,
        points=points,
        best=max(meeting, key=lambda p: _merit(asked.goal, p), default=None),
    )


def _points(
    asked: PlanAsked, cost: StepCost, capacity: Capacity, load: Load, candidate: Candidate
) -> Iterator[Point]:
    limits = Limits(max_num_seqs=asked.max_num_seqs, max_num_batched_tokens=asked.max_num_batched_tokens)
    room = requests_with_room(capacity, load)
    for per_replica in _sweep(asked.concurrency, candidate.replicas, room, asked.max_num_seqs):
        steady = steady_state(cost, capacity, load, limits, concurrency=per_replica)
        ranks = candidate.topology.world_size
        yield Point(
            concurrency=asked.concurrency or per_replica * candidate.replicas,
            steady=steady,
            output_tok_s_gpu=steady.output_tok_s / ranks,
            total_tok_s_gpu=(steady.output_tok_s + steady.input_tok_s) / ranks,
            meets=steady.ttft_s <= (asked.ttft or steady.ttft_s)
            and steady.tpot_s <= (asked.tpot or steady.tpot_s),
        )


def _sweep(asked: int | None, replicas: int, room: int, max_num_seqs: int) -> Sequence[int]:
    """Users of a replica: those that were asked about, or powers of two and what just fits."""
    if asked is not None:
        return [-(-asked // replicas)]
    full = min(room, max_num_seqs)
    steps = (n << i for i in range(MAX_CONCURRENCY.bit_length()) for n in (2, 3))
    return sorted({1, max(full, 1), *(n for n in steps if n <= 2 * full)})


def _merit(goal: str, point: Point) -> float:
    """Higher is better."""
    return -point.steady.tpot_s if goal == "latency" else point.output_tok_s_gpu


def _rank(asked: PlanAsked, planned: Planned) -> tuple[bool, float, int, int, int]:
    """Orders layouts: those that meet what was asked go first."""
    best = planned.best
    merit = _merit(asked.goal, best) if best is not None else 0.0
    tokens = planned.capacity.tokens * planned.candidate.replicas
    if asked.goal == "capacity":
        merit = float(tokens)
    # Between equals the larger hit unit, more replicas and more coordinates lose.
    return (
        best is not None,
        float(f"{merit:.6g}"),
        -planned.capacity.hit_unit,
        -planned.candidate.replicas,
        -planned.candidate.topology.pcp_size,
    )


def _ways_out(asked: PlanAsked, model: FoundModel, device: Device, load: Load) -> tuple[str, ...]:
    """Changes to the question, one at a time, with which something fits."""
    ways = []
    for dtype in ("fp8", "nvfp4"):
        dtypes = weight_dtypes(dtype, model.raw, model.config)
        if fits(asked, model, device, dtypes, load, asked.gpus):
            ways.append(f"--weights-dtype {dtype} (on paper: kvspan holds them as bf16)")
    dtypes = weight_dtypes(asked.weights_dtype, model.raw, model.config)
    more = (asked.gpus * factor for factor in (2, 4, 8, 16, 32))
    for gpus in more:
        if fits(asked, model, device, dtypes, load, gpus):
            apart = gpus > device.host_ranks
            ways.append(f"--gpus {gpus}" + (f" ({APART})" if apart else ""))
            break
    return tuple(ways)


def fits(
    asked: PlanAsked, model: FoundModel, device: Device, dtypes: WeightDtypes, load: Load, gpus: int
) -> bool:
    """Whether some layout of a replica of all the GPUs holds weights and a request."""
    for dcp_size in _divisors(gpus):
        topology = Topology(tp_size=gpus, dcp_size=dcp_size)
        candidate = Candidate(
            replicas=1,
            topology=topology,
            interleave=asked.block_size,
            replicate_q=False,
            exchange="a2a",
        )
        layout = CacheLayout(block_size=asked.block_size, dcp_size=dcp_size, interleave=asked.block_size)
        try:
            check_layout(topology, model.config.heads)
            cost = StepCost(deployment_of(asked, model, device, candidate, dtypes))
            capacity = capacity_of(cost, layout, fraction=asked.gpu_memory_utilization)
            check_capacity(capacity, layout, request_tokens=load.input_tokens + load.output_tokens)
        except ConfigError:
            continue
        return True
    return False
