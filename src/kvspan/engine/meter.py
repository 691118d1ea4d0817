"""What is measured of requests and steps where they are waited for: names as vLLM's users know them.

Times are those of whoever asks: from the moment a request is queued to the moment its token is here.
"""

from dataclasses import dataclass

from kvspan.clock import Clock
from kvspan.config.resolved import Resolved
from kvspan.engine.events import EngineLoad, EngineStats, Event
from kvspan.engine.messages import Profiled, Stepped
from kvspan.metrics import Registry
from kvspan.request import FinishReason

_LONG_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)
_SHORT_S = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5)
_TOKENS = tuple(2**i for i in range(21))


@dataclass(slots=True)
class Timing:
    """When things happened to one output, by the clock of its meter.

    Args:
        arrived_s: it was queued.
        num_prompt_tokens: of its prompt.
        began_s: the first step that computed any of it began; None = none has.
        first_s: its first token came; None = it has not come.
        last_s: its latest token came.
    """

    arrived_s: float
    num_prompt_tokens: int
    began_s: float | None = None
    first_s: float | None = None
    last_s: float = 0.0


class Meter:
    """Keeps the metrics of requests and of engines.

    Args:
        registry: where they are read.
        clock: for durations.
    """

    def __init__(self, registry: Registry, clock: Clock) -> None:
        self.registry, self._clock = registry, clock
        self._outputs, self._steps = _OfOutputs(registry), _OfSteps(registry)
        self._profiles, self._engines = _OfProfiles(registry), _OfEngines(registry)
        self.refused = registry.counter(
            "kvspan_requests_refused_total", "Requests that were refused, by HTTP status.", "status"
        )

    def arrived(self, num_prompt_tokens: int) -> Timing:
        """An output has been queued."""
        return Timing(self._clock.now_s(), num_prompt_tokens)

    def now_s(self) -> float:
        """The time, for all events of a step."""
        return self._clock.now_s()

    def took(self, timing: Timing, event: Event, step_s: float, now_s: float) -> None:
        """A step has given an output something."""
        if timing.began_s is None:
            timing.began_s = max(now_s - step_s, timing.arrived_s)
            self._outputs.queue.observe(timing.began_s - timing.arrived_s)
        if event.token_id is None:
            return
        if timing.first_s is None:
            timing.first_s = now_s
            self._outputs.ttft.observe(now_s - timing.arrived_s)
        else:
            self._outputs.gap.observe(now_s - timing.last_s)
        timing.last_s = now_s

    def ended(self, timing: Timing, reason: FinishReason, num_tokens: int) -> None:
        """An output has ended."""
        self._outputs.finished.add(1, str(reason))
        self._outputs.prompt_size.observe(timing.num_prompt_tokens)
        self._outputs.output_size.observe(num_tokens)
        if timing.first_s is None:
            return
        self._outputs.e2e.observe(timing.last_s - timing.arrived_s)
        if num_tokens > 1:
            self._outputs.tpot.observe((timing.last_s - timing.first_s) / (num_tokens - 1))

    def stepped(self, replica: str, step: Stepped) -> None:
        """An engine has made a step.

        Args:
            replica: its name.
            step: what it gave.
        """
        self._steps.seconds.observe(step.step_s)
        self._steps.rows.observe(len(step.events))
        self.counted(replica, step.stats)

    def counted(self, replica: str, stats: EngineStats) -> None:
        """What an engine has counted since it started.

        Args:
            replica: its name.
            stats: its counters.
        """
        self._steps.prompt.set(stats.prompt_tokens, replica)
        self._steps.queries.set(stats.prompt_tokens, replica)
        self._steps.hits.set(stats.cached_tokens, replica)
        self._steps.output.set(stats.output_tokens, replica)
        self._steps.preemptions.set(stats.preemptions, replica)
        for strategy, number, sent_bytes in (
            ("allgather_q", stats.q_gathers, stats.q_gather_bytes),
            ("allgather_kv", stats.kv_gathers, stats.kv_gather_bytes),
        ):
            self._steps.contexts.set(number, replica, strategy)
            self._steps.context_bytes.set(sent_bytes, replica, strategy)
        self._steps.number.set(stats.exchange_steps, replica, "yes")
        self._steps.number.set(stats.steps - stats.exchange_steps, replica, "no")
        self._steps.shared.set(stats.shared_steps, replica)
        self._steps.team.set(stats.team_steps, replica)
        self._steps.spills.set(stats.spills, replica)

    def profiled(self, replica: str, profile: Profiled) -> None:
        """A step's parts have been timed."""
        for part, seconds in profile.seconds.items():
            self._profiles.parts.add(seconds, replica, part.replace(" ", "_"))
        self._profiles.profiled.add(profile.step_s, replica)
        for each in profile.collectives:
            labels = replica, str(each.rank), each.group, each.op
            self._profiles.collective_s.add(each.seconds, *labels)
            self._profiles.collective_bytes.add(each.sent_bytes, *labels)

    def loaded(self, replica: str, load: EngineLoad, resolved: Resolved, blocks_per_rank: int) -> None:
        """What an engine is busy with.

        Args:
            replica: its name.
            load: the same in numbers.
            resolved: what runs.
            blocks_per_rank: of each rank's pool.
        """
        self._engines.running.set(load.num_running, replica)
        # One pool for a whole group means that each of its ranks has the same blocks in use.
        used = load.used_blocks * (resolved.dcp_size // max(len(load.used_blocks), 1))
        for rank, num_blocks in enumerate(used):
            self._engines.usage.set(num_blocks / blocks_per_rank, replica, str(rank))
            self._engines.used.set(num_blocks * resolved.block_size, replica, str(rank))

    def lives(self, replica: str, *, ready: bool, restarts: int, num_waiting: int) -> None:
        """Whether an engine works, how often it was started again, and who waits for it."""
        self._engines.ready.set(int(ready), replica)
        self._engines.restarts.set(restarts, replica)
        self._engines.waiting.set(num_waiting, replica)


class _OfOutputs:
    """What is measured of outputs, by whoever waits for them."""

    def __init__(self, registry: Registry) -> None:
        self.ttft = registry.histogram(
            "kvspan_time_to_first_token_seconds", "From queueing to the first token.", _LONG_S
        )
        self.gap = registry.histogram(
            "kvspan_inter_token_latency_seconds", "Between a token and the next.", _SHORT_S
        )
        self.tpot = registry.histogram(
            "kvspan_request_time_per_output_token_seconds",
            "Mean time of a request's tokens after the first.",
            _SHORT_S,
        )
        self.e2e = registry.histogram(
            "kvspan_e2e_request_latency_seconds", "From queueing to the last token.", _LONG_S
        )
        self.queue = registry.histogram(
            "kvspan_request_queue_time_seconds", "From queueing to the first step.", _LONG_S
        )
        self.prompt_size = registry.histogram(
            "kvspan_request_prompt_tokens", "Length of prompts.", _TOKENS
        )
        self.output_size = registry.histogram(
            "kvspan_request_generation_tokens", "Length of outputs.", _TOKENS
        )
        self.finished = registry.counter(
            "kvspan_request_success_total", "Outputs that have ended, by reason.", "finished_reason"
        )
        for reason in FinishReason:  # a rate needs to see it at 0 first
            self.finished.add(0, str(reason))


class _OfSteps:
    """What engines count in their steps."""

    def __init__(self, registry: Registry) -> None:
        self.seconds = registry.histogram("kvspan_step_seconds", "Time of a step.", _SHORT_S)
        self.rows = registry.histogram("kvspan_step_rows", "Requests that a step works on.", _TOKENS)
        self.number = registry.counter(
            "kvspan_steps_total",
            "Steps of an engine: those in which ranks exchanged partial attention, and the others.",
            "replica",
            "exchange",
        )
        self.shared = registry.counter(
            "kvspan_shared_prompt_steps_total",
            "Steps of an engine in which PCP coordinates handed new keys of prompts round.",
            "replica",
        )
        self.team = registry.counter(
            "kvspan_team_steps_total",
            "Steps of an engine in which PCP coordinates each read a part of the weights for all rows.",
            "replica",
        )
        self.prompt = registry.counter("kvspan_prompt_tokens_total", "Tokens of prompts.", "replica")
        self.output = registry.counter("kvspan_generation_tokens_total", "Tokens of outputs.", "replica")
        self.queries = registry.counter(
            "kvspan_prefix_cache_queries_total", "Tokens of prompts that were looked up.", "replica"
        )
        self.hits = registry.counter(
            "kvspan_prefix_cache_hits_total", "Tokens of prompts found in the cache.", "replica"
        )
        self.preemptions = registry.counter(
            "kvspan_num_preemptions_total", "Requests that gave their blocks back.", "replica"
        )
        self.spills = registry.counter(
            "kvspan_requests_spilled_total",
            "Requests that left their home before they were long, because it was full.",
            "replica",
        )
        self.contexts = registry.counter(
            "kvspan_prefill_contexts_total",
            "Pieces of prompts with cached context, by what travelled: their queries or its keys.",
            "replica",
            "strategy",
        )
        self.context_bytes = registry.counter(
            "kvspan_prefill_context_sent_bytes_total",
            "Bytes that a rank sent for that, over all layers.",
            "replica",
            "strategy",
        )


class _OfProfiles:
    """What is measured of steps that are taken apart."""

    def __init__(self, registry: Registry) -> None:
        of_kind = ("replica", "rank", "group", "op")
        self.parts = registry.counter(
            "kvspan_profiled_step_part_seconds_total",
            "Time of sampled steps by part: attention, linear, exchange and others.",
            "replica",
            "part",
        )
        self.profiled = registry.counter(
            "kvspan_profiled_step_seconds_total", "Time of the sampled steps.", "replica"
        )
        self.collective_s = registry.counter(
            "kvspan_profiled_collective_seconds_total",
            "Time of a rank in collectives of the sampled steps, waits included.",
            *of_kind,
        )
        self.collective_bytes = registry.counter(
            "kvspan_profiled_collective_sent_bytes_total",
            "Bytes that a rank sent in collectives of the sampled steps.",
            *of_kind,
        )


class _OfEngines:
    """How engines are, and what they are busy with."""

    def __init__(self, registry: Registry) -> None:
        self.restarts = registry.counter(
            "kvspan_engine_restarts_total", "Times that ranks or an engine were restarted.", "replica"
        )
        self.running = registry.gauge(
            "kvspan_num_requests_running", "Requests that hold blocks.", "replica"
        )
        self.waiting = registry.gauge("kvspan_num_requests_waiting", "Requests that wait.", "replica")
        self.ready = registry.gauge("kvspan_engine_ready", "1 while requests are worked on.", "replica")
        self.usage = registry.gauge(
            "kvspan_kv_cache_usage_ratio", "Share of a rank's blocks in use.", "replica", "rank"
        )
        self.used = registry.gauge(
            "kvspan_kv_used_tokens", "Tokens of the blocks in use of a rank.", "replica", "rank"
        )
