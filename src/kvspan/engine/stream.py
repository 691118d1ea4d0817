"""What a request's user waits for: the pieces of its outputs as steps make them.

Knows requests and an event loop. Knows no process and no HTTP.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence

from kvspan.engine.events import Event
from kvspan.engine.generation import Generation, Piece
from kvspan.engine.meter import Timing
from kvspan.errors import KvspanError, OutputError, RequestError
from kvspan.request import FinishReason
from kvspan.sampling.detokenize import Decoder


class RequestStream:
    """A request under way: iterate over it for what each step added to its outputs.

    What several steps added while nobody looked comes in one list. A stream that is left before its end
    must be aborted.

    Args:
        generation: the request.
        decoder: of the model's tokenizer.
        abort: ends the request in the engine.
        timings: of its outputs, by the engine's number.
        ended: called once, when nothing more comes, with the error if there is one.
    """

    def __init__(
        self,
        generation: Generation,
        *,
        decoder: Decoder,
        abort: Callable[[], None],
        timings: Mapping[int, Timing],
        ended: Callable[["RequestStream", KvspanError | None], None] = lambda _, __: None,
    ) -> None:
        self.generation = generation
        self.timings = timings
        self.num_tokens_at_loss: int | None = None
        """Tokens that it had had when an engine that worked on it was lost; None = none was."""
        self._decoder, self._abort = decoder, abort
        self._ended: Callable[[RequestStream, KvspanError | None], None] | None = ended
        self._pieces: list[Piece] = []
        self._error: KvspanError | None = None
        self._bell = asyncio.Event()

    def take(self, event: Event) -> FinishReason | None:
        """Takes in what a step gave one output; why that has ended it, if it has.

        A failure ends all outputs of the request: whoever waits for them gets an error.
        """
        piece = self.generation.take(event, self._decoder)
        if event.failure:
            self.generation.abort()
            self._abort()
            self.fail(OutputError(event.failure))
        else:
            self._pieces.append(piece)
            if self.generation.finished:
                self._tell_end(None)
        return self.generation.outputs[event.request_id].finish_reason

    def fail(self, error: KvspanError) -> None:
        """Ends it: whoever waits for it gets the pieces that are there, and then the error."""
        self._error = error
        self._tell_end(error)
        self.wake()

    def wake(self) -> None:
        """Lets whoever waits for it look."""
        self._bell.set()

    def abort(self) -> None:
        """Ends the request at any moment; its blocks are free before the next step.

        Whoever waits for more of it gets an error, unless it has ended by itself.
        """
        if not self.generation.finished:
            self._error = RequestError("The request was aborted.")
        self.generation.abort()
        self._abort()
        self._tell_end(None)
        self.wake()

    def listen(self, bell: asyncio.Event) -> None:
        """Rings this bell from here on."""
        self._bell = bell

    def pieces(self) -> list[Piece]:
        """What has come since the last call.

        Raises:
            KvspanError: nothing more will come, and why.
        """
        pieces, self._pieces = self._pieces, []
        if not pieces and self._error is not None:
            raise self._error
        return pieces

    async def __aiter__(self) -> AsyncIterator[list[Piece]]:
        async for found in together([self]):
            yield [piece for _, piece in found]

    def _tell_end(self, error: KvspanError | None) -> None:
        ended, self._ended = self._ended, None
        if ended is not None:
            ended(self, error)


async def together(streams: Sequence[RequestStream]) -> AsyncIterator[list[tuple[int, Piece]]]:
    """Iterates over several requests at once: what one step added to all of them is one list.

    Args:
        streams: nobody else listens to them.

    Yields:
        Pieces, each with the place of its stream.

    Raises:
        KvspanError: one of them has failed.
    """
    bell = asyncio.Event()
    for stream in streams:
        stream.listen(bell)
    while True:
        bell.clear()  # before looking, or what comes in between would ring for nobody
        if found := [(i, piece) for i, stream in enumerate(streams) for piece in stream.pieces()]:
            yield found
        elif all(stream.generation.finished for stream in streams):
            return
        else:
            await bell.wait()
