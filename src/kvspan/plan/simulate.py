"""The engine without ranks: its own loop, scheduler and blocks, on a clock that the cost model moves.

`EngineCore` is told to run on `SimulatedRanks`, which answer every step at once and say how long it
would have taken. What is admitted, preempted, cut in chunks or found in the cache is therefore what the
engine would do, and no copy of it. Keys of blocks come from a trace's ids, so prompts cost nothing by
the token.

Knows the engine and the cost model. Knows no tensors, no text and no machine.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from kvspan.cache.prefix import UnitKeys
from kvspan.clock import VirtualClock
from kvspan.config.resolved import Resolved
from kvspan.cost.memory import kv_bytes_per_local_token
from kvspan.cost.steptime import StepCost
from kvspan.cost.work import StepWork
from kvspan.engine.core import EngineCore
from kvspan.engine.events import Event
from kvspan.errors import RequestError
from kvspan.request import SamplingParams
from kvspan.step import Executor, RankReport, Sampled, Step, StepResult
from kvspan.trace.row import TraceRow


class SimulatedRanks:
    """An executor whose ranks take time and compute nothing.

    Args:
        cost: of the steps.
        clock: moved by each step.
    """

    def __init__(self, cost: StepCost, clock: VirtualClock) -> None:
        self.cost = cost
        self._clock = clock
        self._result: StepResult | None = None

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.cost.on.topology.world_size

    def start(self) -> Sequence[RankReport]:
        """Reports of ranks that have loaded their weights and nothing else."""
        on, weights = self.cost.on, self.cost.weights.num_bytes
        token = kv_bytes_per_local_token(on.model, on.topology, kv_dtype_bytes=on.kv_dtype_bytes)
        free = max(on.device.memory_bytes - weights, 0)
        return [RankReport(rank, weights, free, token) for rank in range(self.world_size)]

    def allocate_cache(self, num_blocks: int) -> None:
        """Nothing is allocated."""

    def submit(self, step: Step) -> None:
        """Takes the time that a step would take."""
        work = StepWork.of(
            [(row.start, row.num_tokens) for row in step.rows],
            num_sampled=sum(row.sample for row in step.rows),
            ways=self.cost.ways,
        )
        self._clock.advance(self.cost.step_s(work))
        sampled = tuple(Sampled(row.request_id, 0 if row.sample else None) for row in step.rows)
        self._result = StepResult(step.step_id, sampled)

    def collect(self) -> StepResult:
        """The token 0 for each row that samples."""
        result, self._result = self._result, None
        assert result is not None, "no step is under way"
        return result

    def shutdown(self) -> None:
        """Nothing is to be ended."""


class TraceKeys:
    """Keys of a request's units, from the ids of its trace row.

    An id stands for its block and for all before it, so the id of the block in which a unit ends, with
    the unit's number, says all of its content. Where the ids end, units are the request's own.

    Args:
        row: of the trace.
        block_tokens: tokens that an id stands for.
        unit_tokens: U.
        own: tells the request from all others.
    """

    def __init__(self, row: TraceRow, *, block_tokens: int, unit_tokens: int, own: int) -> None:
        self._ids = row.hash_ids
        self._block_tokens = block_tokens
        self._unit_tokens = unit_tokens
        # A last id stands for what its block holds, which ends with the prompt.
        self._known_tokens = min(len(row.hash_ids) * block_tokens, row.input_length)
        self._own = own.to_bytes(8, "little")

    def key(self, index: int) -> bytes:
        """The key of unit `index`."""
        end = (index + 1) * self._unit_tokens
        if end > self._known_tokens:
            return b"own" + self._own + index.to_bytes(8, "little")
        of_block = self._ids[(end - 1) // self._block_tokens]
        return of_block.to_bytes(8, "little") + index.to_bytes(8, "little")


@dataclass(slots=True, kw_only=True)
class Served:
    """What became of a request, on the simulated clock.

    Args:
        row: of the trace.
        asked_s: when it came.
        first_s: when its first token was there.
        ended_s: when its last token was there.
        num_cached_tokens: of its prompt, found in the cache.
    """

    row: TraceRow
    asked_s: float
    first_s: float = 0.0
    ended_s: float = 0.0
    num_cached_tokens: int = 0

    @property
    def tpot_s(self) -> float:
        """Mean seconds from a token to the next."""
        return (self.ended_s - self.first_s) / max(self.row.output_length - 1, 1)


@dataclass(slots=True, kw_only=True)
class Replay:
    """What a simulation gave. Rates count from `began_s` on, when every user had been served once.

    Args:
        served: requests that ended, in the order in which they did, from `began_s` on.
        refused: why rows were not served, by sentence, with how many.
        began_s: start of what counts.
        ended_s: its end.
        output_tokens: that came in that time.
        input_tokens: of prompts of the requests whose first token came in it.
        cached_tokens: those of them that were found in the cache.
        num_served: requests that ended, before it too.
        num_steps: steps of the engine in all.
        num_preemptions: requests that began again, in all.
        usage_s: share of the pools that requests held, by the time for which they did.
        waiting_s: time for which a request waited for room.
    """

    served: list[Served] = field(default_factory=list)
    refused: dict[str, int] = field(default_factory=dict)
    began_s: float = 0.0
    ended_s: float = 0.0
    output_tokens: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    num_served: int = 0
    num_steps: int = 0
    num_preemptions: int = 0
    usage_s: float = 0.0
    waiting_s: float = 0.0

    @property
    def seconds(self) -> float:
        """How long is counted."""
        return max(self.ended_s - self.began_s, 1e-9)

    @property
    def usage(self) -> float:
        """Share of the pools that requests held, in the mean over time."""
        return self.usage_s / self.seconds

    @property
    def waiting(self) -> float:
        """Share of the time in which some request waited for room: the cache was full."""
        return self.waiting_s / self.seconds

    @property
    def hit_rate(self) -> float:
        """Share of prompts' tokens that were found in the cache."""
        return self.cached_tokens / max(self.input_tokens, 1)

    def begin(self, now_s: float) -> None:
        """Forgets what was counted: from here on it counts."""
        self.began_s = now_s
        self.served = []
        self.output_tokens = self.input_tokens = self.cached_tokens = 0
        self.usage_s = self.waiting_s = 0.0


class Simulation:
    """An engine on simulated ranks, and users who ask it.

    Args:
        resolved: what runs.
        cost: of its steps.
        block_tokens: tokens that an id of the trace stands for.
        clock: that the ranks move; None = one that begins here.
        ranks: others than such as all attend for every row.
    """

    def __init__(
        self,
        resolved: Resolved,
        cost: StepCost,
        *,
        block_tokens: int,
        clock: VirtualClock | None = None,
        ranks: Executor | None = None,
    ) -> None:
        self.clock = clock or VirtualClock()
        self.core = EngineCore(resolved, ranks or SimulatedRanks(cost, self.clock))
        self._block_tokens = block_tokens
        self._unit_tokens = resolved.cache_layout.unit_tokens
        self._params: dict[int, SamplingParams] = {}
        self._num_asked = 0
        self._under_way: dict[int, Served] = {}
        self._replay = Replay()

    def closed_loop(self, users: Sequence[Iterator[TraceRow]], *, num_requests: int) -> Replay:
        """Every user asks, waits for the answer and asks again.

        Args:
            users: rows of each; the same iterator several times is one queue that they share.
            num_requests: after so many answers it is over, whoever is still being served.
        """
        asking: dict[int, Iterator[TraceRow]] = {}
        for rows in users:
            self._next_of(rows, asking)
        first = set(asking)
        while self.core.has_work and self._replay.num_served < num_requests:
            for request_id in self._step():
                self._next_of(asking.pop(request_id), asking)
                if request_id in first:
                    first.remove(request_id)
                    if not first and asking and self._replay.num_served < num_requests:
                        self._replay.begin(self.clock.now_s())
        return self._result()

    def open_loop(self, rows: Sequence[TraceRow]) -> Replay:
        """Requests come when the trace says, whoever is still waiting.

        Args:
            rows: in order of time.
        """
        first_s = rows[0].timestamp_ms / 1e3 if rows else 0.0
        place = 0
        while place < len(rows) or self.core.has_work:
            if not self.core.has_work:
                until_s = rows[place].timestamp_ms / 1e3 - first_s
                self.clock.advance(max(until_s - self.clock.now_s(), 0.0))
            while place < len(rows) and rows[place].timestamp_ms / 1e3 - first_s <= self.clock.now_s():
                self._ask(rows[place], asked_s=rows[place].timestamp_ms / 1e3 - first_s)
                place += 1
            self._step()
        return self._result()

    def _next_of(self, rows: Iterator[TraceRow], asking: dict[int, Iterator[TraceRow]]) -> None:
        """Lets a user ask what comes next; what is refused is passed over."""
        for row in rows:
            if (request_id := self._ask(row, asked_s=self.clock.now_s())) is not None:
                asking[request_id] = rows
                return

    def _ask(self, row: TraceRow, *, asked_s: float) -> int | None:
        keys: UnitKeys = TraceKeys(
            row, block_tokens=self._block_tokens, unit_tokens=self._unit_tokens, own=self._num_asked
        )
        self._num_asked += 1
        params = self._params.get(row.output_length)
        if params is None:
            params = SamplingParams(max_tokens=row.output_length, ignore_eos=True, temperature=0.0)
            self._params[row.output_length] = params
        try:
            request_id = self.core.add_counted(row.input_length, params, keys=keys)
        except RequestError:
            limit = self.core.resolved.max_model_len
            why = f"prompts of --max-model-len {limit} tokens or more are refused"
            self._replay.refused[why] = self._replay.refused.get(why, 0) + 1
            return None
        self._under_way[request_id] = Served(row=row, asked_s=asked_s)
        return request_id

    def _step(self) -> list[int]:
        """Runs a step; the requests that it ended."""
        began_s = self.clock.now_s()
        ended = [e.request_id for e in self.core.step() if self._took(e)]
        replay, seconds = self._replay, self.clock.now_s() - began_s
        replay.usage_s += (1 - self.core.free_tokens / self.core.total_tokens) * seconds
        replay.waiting_s += seconds if self.core.num_waiting else 0.0
        return ended

    def _took(self, event: Event) -> bool:
        """Notes what a step gave a request; whether it ended with that."""
        if event.token_id is None:
            return False
        served, replay = self._under_way[event.request_id], self._replay
        replay.output_tokens += 1
        if not served.first_s:
            served.first_s = self.clock.now_s()
            served.num_cached_tokens = event.num_cached_tokens
            replay.input_tokens += served.row.input_length
            replay.cached_tokens += event.num_cached_tokens
        if event.finish_reason is None:
            return False
        served.ended_s = self.clock.now_s()
        replay.num_served += 1
        replay.served.append(self._under_way.pop(event.request_id))
        return True

    def _result(self) -> Replay:
        replay, stats = self._replay, self.core.stats
        replay.num_steps, replay.num_preemptions = stats.steps, stats.preemptions
        replay.ended_s = self.clock.now_s()
        return replay
