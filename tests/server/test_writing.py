"""Conversations that are written in threads."""

import asyncio
import threading

import pytest

from kvspan.errors import RequestError
from kvspan.server.writing import Writers

pytestmark = pytest.mark.timeout(30)


def test_what_a_template_writes_and_what_it_refuses() -> None:
    def refuse() -> str:
        raise RequestError("No.")

    async def test() -> None:
        writers = Writers(num_threads=1)
        assert await writers.write(lambda: "text") == "text"
        with pytest.raises(RequestError, match="No"):
            await writers.write(refuse)
        assert await writers.write(lambda: "more") == "more"

    asyncio.run(test())


def test_a_slow_template_holds_up_neither_the_loop_nor_other_conversations() -> None:
    released = threading.Event()

    async def test() -> None:
        writers = Writers(num_threads=2)
        slow = asyncio.create_task(writers.write(lambda: str(released.wait())))
        assert await writers.write(lambda: "quick") == "quick"
        assert not slow.done()
        released.set()
        assert await slow == "True"

    asyncio.run(test())


def test_one_that_takes_too_long_is_given_up_and_keeps_its_thread() -> None:
    released = threading.Event()

    async def test() -> None:
        writers = Writers(num_threads=1, limit_s=0.05)
        for _ in range(2):  # the second waits for the first one's thread
            with pytest.raises(RequestError, match=r"within 0.05 s.*--chat-template"):
                await writers.write(lambda: str(released.wait()))
        released.set()
        while True:  # until the first one's thread is free; the test has a time limit
            try:
                assert await writers.write(lambda: "text") == "text"
                return
            except RequestError:
                continue

    asyncio.run(test())
