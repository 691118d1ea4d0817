"""Requests of an engine that is lost go on at another one, or where it is started again."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvspan.config.engine import EngineConfig
from kvspan.config.resolved import Resolved
from kvspan.cost.memory import CachePlan
from kvspan.engine.async_llm import AsyncLLM
from kvspan.engine.build import resolve_engine
from kvspan.engine.checks import check_request
from kvspan.engine.events import EngineLoad, EngineStats, Event
from kvspan.engine.messages import (
    Abort,
    Add,
    Begin,
    Begun,
    Chosen,
    Died,
    Order,
    Ready,
    Stepped,
    decode_order,
    encode,
)
from kvspan.engine.stream import RequestStream
from kvspan.errors import EngineDeadError, RequestError
from kvspan.request import FinishReason, SamplingParams
from kvspan.server.exposition import exposition
from kvspan.step import unpack_tokens
from kvspan.testing.tiny import TINY

pytestmark = pytest.mark.timeout(60)
PLAN = CachePlan(
    blocks_per_rank=1, tokens_per_rank=16, tokens_total=16, hit_unit=16, bytes_per_rank=1, why=""
)
PROMPT = [3, 4, 5]


class FakeEngine:
    """An engine's process that says what a test has it say, and keeps what it is told."""

    refuses = ""
    """Why it ends at its start; of all that are still to come."""

    def __init__(
        self,
        resolved: Resolved,
        *,
        heard: Callable[[bytes], None],
        lost: Callable[[str], None],
        **_: Any,
    ) -> None:
        self._resolved, self._heard, self.lost = resolved, heard, lost
        self.added: list[Add] = []
        self.aborted: list[int] = []

    async def connect(self) -> None: ...

    async def end(self, _: float) -> None: ...

    def tell(self, order: Order) -> None:
        if isinstance(order, Abort):
            self.aborted += order.request_ids
        elif self.refuses:
            self.lost(self.refuses)
        elif isinstance(order, Begin):
            places = order.options["max_num_seqs"] or self._resolved.max_num_seqs
            resolved = msgspec.structs.replace(self._resolved, max_num_seqs=places)
            self._heard(encode(Chosen(resolved, resolved.model)))
            self._heard(encode(Ready((), PLAN)))

    def send(self, body: bytes) -> None:
        order = decode_order(body)
        assert isinstance(order, Add)
        self.added.append(order)

    def begins(self) -> None:
        """With everything that it was given."""
        self.says_it_begins(*(order.request_id for order in self.added))

    def says_it_begins(self, *request_ids: int) -> None:
        self._heard(encode(Begun(request_ids)))

    def gives_up(self, why: str) -> None:
        self._heard(encode(Died("EngineDeadError", why)))
        self.lost("It has hung up.")

    def gives(
        self, request_id: int, token_id: int, reason: FinishReason | None = None, *, running: int = 0
    ) -> None:
        event = Event(
            request_id=request_id,
            token_id=token_id,
            logprobs=(),
            prompt_logprobs=(),
            finish_reason=reason,
            stop_token=None,
            num_cached_tokens=0,
            num_computed_tokens=3,
        )
        self._heard(encode(Stepped((event,), EngineStats(), EngineLoad(running, 0, (0,)), 0.1)))


@pytest.fixture
def engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[FakeEngine]:
    """Those that were started, in order; a model is at `tmp_path`."""
    (tmp_path / "config.json").write_text(json.dumps(TINY["llama-gqa"]))
    options = {"model": str(tmp_path), "load_format": "dummy"}
    resolved, _ = resolve_engine(EngineConfig.from_mapping(options))
    started: list[FakeEngine] = []

    def start(**given: Any) -> FakeEngine:
        started.append(FakeEngine(resolved, **given))
        return started[-1]

    monkeypatch.setattr("kvspan.engine.replica.EngineProcess", start)
    return started


def run(
    model: Path,
    test: Callable[[AsyncLLM], Any],
    *,
    replicas: int = 2,
    max_restarts: int = 0,
    max_num_seqs: int | None = None,
) -> None:
    async def whole() -> None:
        options: dict[str, Any] = {"load_format": "dummy", "data_parallel_size": replicas}
        options |= {} if max_num_seqs is None else {"max_num_seqs": max_num_seqs}
        async with AsyncLLM(str(model), max_restarts=max_restarts, **options) as llm:
            await test(llm)

    asyncio.run(whole())


def asked(llm: AsyncLLM, engines: list[FakeEngine], **params: Any) -> tuple[RequestStream, int]:
    """A request, and the number of the engine that has it."""
    stream = llm.add(PROMPT, SamplingParams(max_tokens=2, **params))
    return stream, next(i for i, engine in enumerate(engines) if engine.added)


async def started_again(llm: AsyncLLM, engines: list[FakeEngine]) -> FakeEngine:
    """The engine that comes after the first one, when it works."""
    while not (len(engines) > 1 and llm.health.ready):
        await asyncio.sleep(0)
    return engines[-1]


async def tokens(stream: RequestStream) -> list[int | None]:
    return [piece.token_id async for pieces in stream for piece in pieces]


def test_a_request_that_has_had_nothing_goes_to_another_engine(
    tmp_path: Path, engines: list[FakeEngine]
) -> None:
    async def test(llm: AsyncLLM) -> None:
        stream, first = asked(llm, engines, n=2)
        engines[first].lost("It was killed.")
        other = engines[1 - first]
        assert other.added == engines[first].added  # numbers, seeds and all
        for order in other.added:
            other.gives(order.request_id, 7)
            other.gives(order.request_id, 8, FinishReason.LENGTH)
        assert await tokens(stream) == [7, 8, 7, 8]
        assert llm.num_unfinished == 0

    run(tmp_path, test)


def test_a_request_goes_on_from_its_tokens(tmp_path: Path, engines: list[FakeEngine]) -> None:
    """Of three outputs one has ended, and one has had nothing."""

    async def test(llm: AsyncLLM) -> None:
        stream, first = asked(llm, engines, n=3)
        ended, begun, fresh = (order.request_id for order in engines[first].added)
        engines[first].gives(ended, 7, FinishReason.STOP)
        engines[first].gives(begun, 8)
        engines[first].lost("It was killed.")
        other = engines[1 - first]
        found = {order.request_id: unpack_tokens(order.tokens).tolist() for order in other.added}
        assert found == {begun: [*PROMPT, 8], fresh: PROMPT}
        assert {order.num_prompt_tokens for order in other.added} == {len(PROMPT)}
        other.gives(begun, 9, FinishReason.LENGTH)
        other.gives(fresh, 10, FinishReason.STOP)
        assert await tokens(stream) == [7, 8, 9, 10]

    run(tmp_path, test)


def test_a_request_that_is_the_end_of_its_engine_is_not_the_end_of_all(
    tmp_path: Path, engines: list[FakeEngine]
) -> None:
    """It is moved once, as long as it has had nothing since."""

    async def test(llm: AsyncLLM) -> None:
        stream, first = asked(llm, engines)
        engines[first].begins()
        engines[first].lost("It was killed.")
        moved = next(i for i in range(3) if i != first and engines[i].added)
        engines[moved].begins()
        engines[moved].lost("So was this.")
        assert sum(len(engine.added) for engine in engines) == 2
        with pytest.raises(EngineDeadError, match="So was this"):
            await tokens(stream)

    run(tmp_path, test, replicas=3)


def test_a_request_that_has_advanced_is_moved_again(tmp_path: Path, engines: list[FakeEngine]) -> None:
    async def test(llm: AsyncLLM) -> None:
        stream, first = asked(llm, engines, n=2)
        engines[first].begins()
        engines[first].lost("It was killed.")
        second = next(i for i in range(3) if i != first and engines[i].added)
        engines[second].begins()
        advanced, fresh = (order.request_id for order in engines[second].added)
        engines[second].gives(advanced, 7)
        engines[second].lost("So was this.")
        third = engines[3 - first - second]
        found = {order.request_id: unpack_tokens(order.tokens).tolist() for order in third.added}
        assert found == {advanced: [*PROMPT, 7], fresh: PROMPT}
        for request_id in found:
            third.gives(request_id, 8, FinishReason.LENGTH)
        assert await tokens(stream) == [7, 8, 8]

    run(tmp_path, test, replicas=3)


def test_of_several_prompts_all_are_queued_or_none_and_each_is_checked_once(
    tmp_path: Path, engines: list[FakeEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[list[int]] = []

    def check(resolved: Resolved, prompt: list[int], params: SamplingParams) -> None:
        checked.append(prompt)
        check_request(resolved, prompt, params)

    monkeypatch.setattr("kvspan.engine.async_llm.check_request", check)

    async def test(llm: AsyncLLM) -> None:
        params = SamplingParams(max_tokens=1)
        with pytest.raises(RequestError, match="empty"):
            llm.add_all([PROMPT, []], params)
        assert not engines[0].added
        assert llm.num_unfinished == 0
        checked.clear()
        streams = llm.add_all([PROMPT, [6]], params)
        assert checked == [PROMPT, [6]]
        for request_id in (0, 1):
            engines[0].gives(request_id, 8, FinishReason.LENGTH)
        assert [await tokens(stream) for stream in streams] == [[8], [8]]

    run(tmp_path, test, replicas=1)


def test_a_lost_engine_is_busy_with_nothing(tmp_path: Path, engines: list[FakeEngine]) -> None:
    """Its places are free: with --max-queue 0 nobody else would ever get in."""

    async def test(llm: AsyncLLM) -> None:
        _, first = asked(llm, engines)
        engines[first].gives(engines[first].added[0].request_id, 7, running=1)
        assert llm.health.load.num_running == 1
        engines[first].lost("It was killed.")
        assert llm.health.load.num_running == 0
        running = f'kvspan_num_requests_running{{replica="{first}"}}'
        assert f"{running} 0.0" in exposition(llm.metrics()).decode()

    run(tmp_path, test)


def test_without_another_engine_it_ends(tmp_path: Path, engines: list[FakeEngine]) -> None:
    async def test(llm: AsyncLLM) -> None:
        stream, first = asked(llm, engines)
        engines[1 - first].lost("It was killed first.")
        engines[first].lost("It was killed.")
        with pytest.raises(EngineDeadError, match="It was killed"):
            await tokens(stream)

    run(tmp_path, test)


def test_who_aborts_a_moved_request_is_heard_by_the_engine_that_has_it(
    tmp_path: Path, engines: list[FakeEngine]
) -> None:
    async def test(llm: AsyncLLM) -> None:
        stream, first = asked(llm, engines)
        engines[first].lost("It was killed.")
        stream.abort()
        other = engines[1 - first]
        assert other.aborted == [order.request_id for order in other.added]
        assert llm.num_unfinished == 0

    run(tmp_path, test)


def test_the_only_engine_goes_on_with_its_requests_when_it_works_again(
    tmp_path: Path, engines: list[FakeEngine]
) -> None:
    """Of three outputs one has ended, one has had a token, and one has had nothing."""

    async def test(llm: AsyncLLM) -> None:
        stream, first = asked(llm, engines, n=3)
        ended, begun, fresh = (order.request_id for order in engines[first].added)
        engines[first].gives(ended, 7, FinishReason.STOP)
        engines[first].gives(begun, 8)
        engines[first].lost("It was killed.")
        assert llm.num_unfinished == 2
        again = await started_again(llm, engines)
        found = {order.request_id: unpack_tokens(order.tokens).tolist() for order in again.added}
        assert found == {begun: [*PROMPT, 8], fresh: PROMPT}
        again.gives(begun, 9, FinishReason.LENGTH)
        again.gives(fresh, 10, FinishReason.STOP)
        assert await tokens(stream) == [7, 8, 9, 10]
        assert llm.num_unfinished == 0

    run(tmp_path, test, replicas=1, max_restarts=1)


def test_with_a_request_that_has_had_nothing_an_engine_is_started_again_once(
    tmp_path: Path, engines: list[FakeEngine]
) -> None:
    async def test(llm: AsyncLLM) -> None:
        stream, first = asked(llm, engines)
        engines[first].begins()
        engines[first].lost("It was killed.")
        again = await started_again(llm, engines)
        other = llm.add(PROMPT, SamplingParams(max_tokens=1))
        again.begins()
        again.lost("So was this.")
        with pytest.raises(EngineDeadError, match="So was this"):
            await tokens(stream)
        while len(engines) < 3 or not engines[2].added:
            await asyncio.sleep(0)
        engines[2].gives(engines[2].added[0].request_id, 9, FinishReason.LENGTH)
        assert await tokens(other) == [9]

    run(tmp_path, test, replicas=1, max_restarts=3)


def test_who_leaves_while_the_engine_is_started_again_is_not_taken_along(
    tmp_path: Path, engines: list[FakeEngine]
) -> None:
    async def test(llm: AsyncLLM) -> None:
        stays, first = asked(llm, engines)
        leaves, _ = asked(llm, engines)
        engines[first].lost("It was killed.")
        leaves.abort()
        again = await started_again(llm, engines)
        assert [order.request_id for order in again.added] == list(stays.generation.outputs)
        assert not again.aborted  # it has never heard of it

    run(tmp_path, test, replicas=1, max_restarts=1)


def test_what_waits_for_an_engine_ends_when_that_is_given_up(
    tmp_path: Path, engines: list[FakeEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(llm: AsyncLLM) -> None:
        stream, first = asked(llm, engines)
        monkeypatch.setattr(FakeEngine, "refuses", "It cannot begin.")
        engines[first].lost("It was killed.")
        with pytest.raises(EngineDeadError, match="It cannot begin"):
            await tokens(stream)
        assert len(engines) == 3
        assert llm.health.gone

    run(tmp_path, test, replicas=1, max_restarts=2)


def test_a_process_for_which_there_is_no_memory_is_one_that_cannot_begin(
    tmp_path: Path, engines: list[FakeEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    def connect(_: FakeEngine) -> None:
        raise OSError(12, "Cannot allocate memory")

    async def test(llm: AsyncLLM) -> None:
        stream, first = asked(llm, engines)
        monkeypatch.setattr(FakeEngine, "connect", connect)
        engines[first].lost("It was killed.")
        waits = llm.add(PROMPT, SamplingParams(max_tokens=1))
        for each in (stream, waits):
            with pytest.raises(EngineDeadError, match="could not be started"):
                await tokens(each)
        assert len(engines) == 3
        assert llm.health.gone

    run(tmp_path, test, replicas=1, max_restarts=2)


def test_an_engine_that_has_given_up_ends_its_requests(
    tmp_path: Path, engines: list[FakeEngine]
) -> None:
    """It has tried to start its ranks again as often as it may."""

    async def test(llm: AsyncLLM) -> None:
        stream, first = asked(llm, engines)
        engines[first].gives_up("Rank 1 has ended.")
        with pytest.raises(EngineDeadError, match="Rank 1"):
            await tokens(stream)

    run(tmp_path, test, replicas=1, max_restarts=1)


def test_what_waits_for_an_engine_ends_with_the_server(
    tmp_path: Path, engines: list[FakeEngine]
) -> None:
    async def test(llm: AsyncLLM) -> None:
        stream, first = asked(llm, engines)
        engines[first].lost("It was killed.")
        await llm.shutdown()
        with pytest.raises(EngineDeadError, match="shut down"):
            await tokens(stream)

    run(tmp_path, test, replicas=1, max_restarts=1)


def test_who_comes_while_the_only_engine_is_started_again_waits_behind_those_that_it_had(
    tmp_path: Path, engines: list[FakeEngine]
) -> None:
    async def test(llm: AsyncLLM) -> None:
        _, first = asked(llm, engines)
        engines[first].gives(0, 7)
        engines[first].lost("It was killed.")
        comes, _ = asked(llm, engines, n=2)
        leaves, _ = asked(llm, engines)
        leaves.abort()
        assert not llm.health.ready
        assert llm.num_unfinished == 3
        again = await started_again(llm, engines)
        found = [(order.request_id, unpack_tokens(order.tokens).tolist()) for order in again.added]
        assert found == [(0, [*PROMPT, 7]), (1, PROMPT), (2, PROMPT)]
        assert not again.aborted
        for request_id in comes.generation.outputs:
            again.gives(request_id, 8, FinishReason.STOP)
        assert await tokens(comes) == [8, 8]

    run(tmp_path, test, replicas=1, max_restarts=1)


def test_who_has_waited_for_an_engine_has_not_been_lost_with_one(
    tmp_path: Path, engines: list[FakeEngine]
) -> None:
    """It is tried at two engines, like any other that has had nothing."""

    async def test(llm: AsyncLLM) -> None:
        engines[0].lost("It was killed.")
        stream = llm.add(PROMPT, SamplingParams(max_tokens=1))
        for number in (1, 2):
            while len(engines) == number or not engines[number].added:
                await asyncio.sleep(0)
            engines[number].begins()
            if number == 1:
                engines[1].lost("So was this.")
        engines[2].lost("And this.")
        with pytest.raises(EngineDeadError, match="And this"):
            await tokens(stream)

    run(tmp_path, test, replicas=1, max_restarts=3)


def test_who_only_queued_at_engines_that_were_lost_is_not_blamed(
    tmp_path: Path, engines: list[FakeEngine]
) -> None:
    """Of two requests each engine begins with the first, and is lost; the second one is still there."""

    async def test(llm: AsyncLLM) -> None:
        blamed, _ = asked(llm, engines)
        queued, _ = asked(llm, engines)
        for number in (0, 1):
            while len(engines) == number or not llm.health.ready:
                await asyncio.sleep(0)
            engines[number].says_it_begins(*blamed.generation.outputs)
            engines[number].lost(f"Engine {number} was killed.")
        with pytest.raises(EngineDeadError, match="Engine 1 was killed"):
            await tokens(blamed)
        while len(engines) < 3 or not llm.health.ready:
            await asyncio.sleep(0)
        assert [order.request_id for order in engines[2].added] == list(queued.generation.outputs)
        engines[2].begins()
        engines[2].lost("This was the first with it.")
        while len(engines) < 4 or not llm.health.ready:
            await asyncio.sleep(0)
        engines[3].gives(engines[3].added[0].request_id, 8, FinishReason.LENGTH)
        assert await tokens(queued) == [8]

    run(tmp_path, test, replicas=1, max_restarts=3)


def test_nobody_waits_for_an_engine_that_is_not_started_again(
    tmp_path: Path, engines: list[FakeEngine]
) -> None:
    async def test(llm: AsyncLLM) -> None:
        engines[0].lost("It was killed.")
        comes = llm.add(PROMPT, SamplingParams(max_tokens=1))
        with pytest.raises(EngineDeadError, match="It was killed"):
            await tokens(comes)
        assert llm.health.gone
        with pytest.raises(EngineDeadError, match="It was killed"):
            llm.add(PROMPT, SamplingParams(max_tokens=1))
        assert llm.num_unfinished == 0

    run(tmp_path, test, replicas=1, max_restarts=0)


def test_what_waits_for_an_engine_goes_to_another_that_is_back_first(
    tmp_path: Path, engines: list[FakeEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as it has places for; the others when a place is free, in line, or when theirs is back."""
    doors = {2: asyncio.Event(), 3: asyncio.Event()}  # the engines that are started again

    async def connect(engine: FakeEngine) -> None:
        if door := doors.get(engines.index(engine)):
            await door.wait()

    def given(number: int) -> list[int]:
        return [order.request_id for order in engines[number].added]

    async def works(number: int) -> None:
        while not given(number):
            await asyncio.sleep(0)

    async def test(llm: AsyncLLM) -> None:
        monkeypatch.setattr(FakeEngine, "connect", connect)
        streams = [
            llm.add([3, 4, number], SamplingParams(max_tokens=2), priority=priority)
            for number, priority in enumerate([0, 0, -1, 0])
        ]
        assert [given(0), given(1)] == [[0, 2], [1, 3]]
        engines[0].gives(0, 6)
        engines[1].lost("It was killed.")
        assert given(0) == [0, 2, 1]  # for 3 there is no place
        engines[0].lost("So was this.")
        streams.append(llm.add(PROMPT, SamplingParams(max_tokens=2)))
        while len(engines) < 4:
            await asyncio.sleep(0)
        doors[2].set()
        await works(2)
        assert given(2) == [3, 4, 2]
        engines[2].gives(3, 7)
        assert given(2) == [3, 4, 2]
        engines[2].gives(3, 8, FinishReason.LENGTH)
        assert given(2) == [3, 4, 2, 0]
        assert unpack_tokens(engines[2].added[-1].tokens).tolist() == [3, 4, 0, 6]
        streams[2].abort()
        assert given(2) == [3, 4, 2, 0, 1]
        streams.append(llm.add(PROMPT, SamplingParams(max_tokens=2)))
        assert given(2) == [3, 4, 2, 0, 1, 5]  # it does not wait for an engine while there is one
        doors[3].set()
        while not all(health.ready for health in llm.healths):
            await asyncio.sleep(0)
        assert not engines[3].added
        for number in (0, 1, 4, 5):
            engines[2].gives(number, 9, FinishReason.STOP)
        found = [await tokens(stream) for stream in streams if stream is not streams[2]]
        assert found == [[6, 9], [9], [7, 8], [9], [9]]
        assert llm.num_unfinished == 0

    run(tmp_path, test, max_restarts=1, max_num_seqs=3)


def test_who_finds_no_place_elsewhere_goes_on_where_it_was_if_that_is_back_first(
    tmp_path: Path, engines: list[FakeEngine]
) -> None:
    async def test(llm: AsyncLLM) -> None:
        streams = [llm.add([3, 4, number], SamplingParams(max_tokens=1)) for number in range(2)]
        engines[0].lost("It was killed.")
        assert len(engines[1].added) == 1
        while not all(health.ready for health in llm.healths):
            await asyncio.sleep(0)
        assert [order.request_id for order in engines[2].added] == [0]
        engines[2].gives(0, 8, FinishReason.LENGTH)
        engines[1].gives(1, 9, FinishReason.LENGTH)
        assert [await tokens(stream) for stream in streams] == [[8], [9]]

    run(tmp_path, test, max_restarts=1, max_num_seqs=1)


def test_who_may_not_wait_goes_to_an_engine_that_is_full(
    tmp_path: Path, engines: list[FakeEngine]
) -> None:
    """There is no other that will be back."""

    async def test(llm: AsyncLLM) -> None:
        streams = [llm.add([3, 4, number], SamplingParams(max_tokens=1)) for number in range(2)]
        engines[0].lost("It was killed.")
        while len(engines[1].added) < 2:
            await asyncio.sleep(0)
        for number in range(2):
            engines[1].gives(number, 8, FinishReason.LENGTH)
        assert [await tokens(stream) for stream in streams] == [[8], [8]]

    run(tmp_path, test, max_restarts=0, max_num_seqs=1)


def test_what_waits_for_an_engine_that_is_given_up_goes_to_another(
    tmp_path: Path, engines: list[FakeEngine]
) -> None:
    """Both are lost, one with a request; of the two that come then each waits for one of them."""

    async def test(llm: AsyncLLM) -> None:
        engines[0].lost("It was killed.")
        while len(engines) < 3 or not all(health.ready for health in llm.healths):
            await asyncio.sleep(0)
        engines[1].lost("It was killed.")
        streams = [llm.add(PROMPT, SamplingParams(max_tokens=1))]
        assert engines[2].added
        engines[2].lost("It was killed again.")
        streams += [llm.add(PROMPT, SamplingParams(max_tokens=1)) for _ in range(2)]
        while len(engines) < 4 or len(engines[3].added) < 3:
            await asyncio.sleep(0)
        assert [health.gone for health in llm.healths] == [True, False]
        for request_id in (0, 1, 2):
            engines[3].gives(request_id, 8, FinishReason.LENGTH)
        assert [await tokens(stream) for stream in streams] == [[8], [8], [8]]

    run(tmp_path, test, replicas=2, max_restarts=1)
