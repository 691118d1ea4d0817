"""What a request's user waits for: the pieces of its outputs as steps make them.

Knows a request and an event loop. Knows no process and no HTTP.
"""

import asyncio
from collections.abc import Callable
from typing import Self

from kvspan.engine.core import Event
from kvspan.engine.generation import Generation, Piece
from kvspan.errors import KvspanError
from kvspan.sampling.detokenize import Decoder


class RequestStream:
    """A request under way: iterate over it for what each step added to its outputs.

    What several steps added while nobody looked comes in one list. A stream that is left before its end
    must be aborted.

    Args:
        generation: the request.
        decoder: of the model's tokenizer.
        abort: ends the request in the engine.
    """

    def __init__(self, generation: Generation, *, decoder: Decoder, abort: Callable[[], None]) -> None:
        self.generation = generation
        self._decoder, self._abort = decoder, abort
        self._pieces: list[Piece] = []
        self._error: KvspanError | None = None
        self._waiter: asyncio.Future[None] | None = None

    def take(self, event: Event) -> bool:
        """Takes in what a step gave one output; whether that has ended it."""
        self._pieces.append(self.generation.take(event, self._decoder))
        return self.generation.outputs[event.request_id].finish_reason is not None

    def fail(self, error: KvspanError) -> None:
        """Ends it: whoever waits for it gets the pieces that are there, and then the error."""
        self._error = error
        self.wake()

    def wake(self) -> None:
        """Lets whoever waits for it look."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def abort(self) -> None:
        """Ends the request at any moment; its blocks are free before the next step."""
        self.generation.abort()
        self._abort()
        self.wake()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> list[Piece]:
        while not self._pieces:
            if self._error is not None:
                raise self._error
            if self.generation.finished:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        pieces, self._pieces = self._pieces, []
        return pieces
