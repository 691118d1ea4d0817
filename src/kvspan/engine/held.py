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

_NOTHING_YET = -1


@dataclass(frozen=True, slots=True)
class _Output:
    """An output that has not ended.

    Args:
        stream: of its request.
        order: as the first engine got it.
        num_left: tokens that it had had when another engine was lost with it; less than any number if
            none was.
    """

    stream: RequestStream
    order: Add
    num_left: int

    @property
    def has_advanced(self) -> bool:
        """Whether this engine has done anything for it, or is the first to try."""
        return self.stream.generation.outputs[self.order.request_id].num_tokens > self.num_left


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
    def orders(self) -> list[Add]:
        """Of all outputs, for an engine that goes on with them where others were lost."""
        return [going_on(each.order, each.stream.generation) for each in self._outputs.values()]

    def add(self, stream: RequestStream, orders: Sequence[Add], *, is_left: bool = False) -> None:
        """Holds a request.

        Args:
            stream: of it.
            orders: of its outputs, as the first engine got them.
            is_left: whether another engine was lost with it.
        """
        outputs = stream.generation.outputs
        for order in orders:
            num_left = outputs[order.request_id].num_tokens if is_left else _NOTHING_YET
            self._outputs[order.request_id] = _Output(stream, order, num_left)

    def stream_of(self, request_id: int) -> RequestStream | None:
        """The stream of an output; None if it has ended."""
        output = self._outputs.get(request_id)
        return None if output is None else output.stream

    def orders_of(self, stream: RequestStream) -> list[Add]:
        """Those of a request's outputs that have not ended."""
        return [self._outputs[i].order for i in stream.generation.outputs if i in self._outputs]

    def orders_after_a_loss(self, stream: RequestStream) -> list[Add]:
        """The same, if another engine may go on with them now that this one is lost; else none.

        One that was left before has to have had a token since: a request that is the end of each
        engine that begins with it would be the end of all of them.
        """
        orders = self.orders_of(stream)
        has_advanced = any(self._outputs[order.request_id].has_advanced for order in orders)
        return orders if has_advanced else []

    def forget(self, request_id: int) -> bool:
        """Whether an output was held that is no longer."""
        return self._outputs.pop(request_id, None) is not None

    def drop(self, stream: RequestStream) -> None:
        """Forgets a request."""
        for request_id in stream.generation.outputs:
            self.forget(request_id)


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
