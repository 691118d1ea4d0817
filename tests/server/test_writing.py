"""Conversations that are written in threads."""

import asyncio
import threading

import pytest

from kvspan.errors import RequestError
from kvspan.loading.chat_template import ChatTemplate
from kvspan.server.errors import RefusedError
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


def test_one_that_takes_too_long_is_stopped() -> None:
    stopped = threading.Event()

    def for_ever() -> str:
        try:
            while True:
                pass
        finally:
            stopped.set()

    async def test() -> None:
        writers = Writers(num_threads=1, limit_s=0.05)
        with pytest.raises(RequestError, match=r"within 0.05 s.*--chat-template"):
            await writers.write(for_ever)
        assert stopped.wait(10)
        await until_free(writers)

    asyncio.run(test())


def test_a_template_of_jinja_that_never_ends_is_stopped() -> None:
    source = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    template = ChatTemplate({"default": source}, where="", special_tokens={})

    async def test() -> None:
        writers = Writers(num_threads=1, limit_s=0.1)
        with pytest.raises(RequestError, match=r"within 0\.1 s"):
            await writers.write(lambda: template.render([], add_generation_prompt=False, variables={}))
        await until_free(writers)

    asyncio.run(test())


def test_those_that_cannot_be_stopped_keep_their_threads_and_the_others_are_told() -> None:
    released = threading.Event()

    async def test() -> None:
        writers = Writers(num_threads=2, limit_s=0.05)
        for _ in range(2):
            with pytest.raises(RequestError, match=r"within 0\.05 s"):
                await writers.write(lambda: str(released.wait()))
        with pytest.raises(RefusedError, match=r"All 2 threads .* 0.05 s: .* another --chat-template"):
            await writers.write(lambda: "text")
        released.set()
        await until_free(writers)

    asyncio.run(test())


async def until_free(writers: Writers) -> None:
    """Until a conversation is written; the test has a time limit."""
    while True:
        try:
            assert await writers.write(lambda: "text") == "text"
            return
        except (RequestError, RefusedError):
            await asyncio.sleep(0)
