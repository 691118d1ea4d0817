"""The requests that an engine works on: who waits for them, and what others need to go on with them.

Knows streams and orders. Knows no process and no steps.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from kvspan.engine.generation import Generation
from kvspan.engine.messages import Add
from kvspan.engine.stream import RequestStream
from kvspan.step import pack_tokens


@dataclass(slots=True)
class _Output:
    """An output that has not ended.

    Args:
        stream: of its request.
        order: as the first engine got it.
        has_begun: whether this engine has said that it works on it.
    """

    stream: RequestStream
    order: Add
    has_begun: bool = False


class Held:
    """Requests of an engine that have not ended."""

    def __init__(self) -> None:
        self._outputs: dict[int, _Output] = {}

    def __len__(self) -> int:
        return len(self._outputs)

    @property
    def streams(self) -> list[RequestStream]:
        """One for each request."""
        return list(dict.fromkeys(output.stream for output in self._outputs.values()))

    @property
    def in_line(self) -> list[RequestStream]:
        """The same, the first in line first."""
        return sorted(self.streams, key=lambda stream: place_of(self.orders_of(stream)))

    @property
    def orders(self) -> list[Add]:
        """Of all outputs, for an engine that goes on with them where others were lost."""
        return [going_on(each.order, each.stream.generation) for each in self._outputs.values()]

    def add(self, stream: RequestStream, orders: Sequence[Add]) -> None:
        """Holds a request, which the engine has not begun with.

        Args:
            stream: of it.
            orders: of its outputs, as the first engine got them.
        """
        for order in orders:
            self._outputs[order.request_id] = _Output(stream, order)

    def begin(self, request_ids: Sequence[int]) -> None:
        """Takes in that the engine works on outputs from here on."""
        for request_id in request_ids:
            if (output := self._outputs.get(request_id)) is not None:
                output.has_begun = True

    def stream_of(self, request_id: int) -> RequestStream | None:
        """The stream of an output; None if it has ended."""
        output = self._outputs.get(request_id)
        return None if output is None else output.stream

    def orders_of(self, stream: RequestStream) -> list[Add]:
        """Those of a request's outputs that have not ended."""
        return [self._outputs[i].order for i in stream.generation.outputs if i in self._outputs]

    def orders_after_a_loss(self, stream: RequestStream) -> list[Add]:
        """The same, if another engine may go on with them now that this one is lost; else none.

        One that only waited had no part in the loss. One that this engine worked on, like one that was
        lost before, has to have had a token in between: a request that is the end of each engine that
        begins with it would be the end of all of them.
        """
        orders = self.orders_of(stream)
        if not any(self._outputs[order.request_id].has_begun for order in orders):
            return orders
        before, stream.num_tokens_at_loss = stream.num_tokens_at_loss, stream.generation.num_tokens
        return orders if before is None or before < stream.num_tokens_at_loss else []

    def forget(self, request_id: int) -> bool:
        """Whether an output was held that is no longer."""
        return self._outputs.pop(request_id, None) is not None

    def drop(self, stream: RequestStream) -> None:
        """Forgets a request."""
        for request_id in stream.generation.outputs:
            self.forget(request_id)


def place_of(orders: Sequence[Add]) -> tuple[int, int]:
    """A request's place in line, by its orders: the lower, the earlier."""
    return orders[0].priority, orders[0].request_id


def going_on(order: Add, generation: Generation) -> Add:
    """The order for an engine that goes on where another one was lost.

    Args:
        order: as the first engine got it.
        generation: what it has had since.
    """
    return msgspec.structs.replace(
        order,
        tokens=order.tokens + pack_tokens(generation.outputs[order.request_id].token_ids),
        num_scored_tokens=len(generation.prompt_logprobs) - 1,  # nothing predicts the first
    )
