"""Outputs that are held to a form: which tokens each may go on with, and what a token made of it.

Knows requests by number, and grammars. Knows no scheduler and no ranks.
"""

from dataclasses import dataclass

import msgspec

from kvspan.request import SamplingParams
from kvspan.sampling.grammar import Grammar, Grammars
from kvspan.step import Row, Step


@dataclass(frozen=True, slots=True)
class Held:
    """How an output stands to its form after a token.

    Args:
        ended: nothing can follow.
        failure: a sentence, if it can be held to no longer; else empty.
    """

    ended: bool = False
    failure: str = ""


FREE = Held()
"""An output without a form."""


class Forms:
    """The forms of all requests of an engine.

    Args:
        grammars: makes them.
    """

    def __init__(self, grammars: Grammars) -> None:
        self._grammars = grammars
        self._by_id: dict[int, Grammar] = {}

    def check(self, params: SamplingParams) -> None:
        """Refuses a form that no output can be held to.

        Raises:
            RequestError: says why.
        """
        if params.structured_outputs is not None:
            self._grammars.check(params.structured_outputs)

    def begin(self, request_id: int, params: SamplingParams) -> SamplingParams:
        """Begins to hold a request to the form that it asks for, if it does.

        Returns:
            What workers are told: they get masks, and a schema would only be carried to each of them.

        Raises:
            RequestError: there is no such form.
        """
        if params.structured_outputs is None:
            return params
        self._by_id[request_id] = self._grammars.start(params.structured_outputs)
        return msgspec.structs.replace(params, structured_outputs=None)

    def end(self, request_id: int) -> None:
        """Forgets a request."""
        self._by_id.pop(request_id, None)

    def masked(self, step: Step) -> Step:
        """The step, with the tokens that each output may go on with."""
        if not self._by_id:
            return step
        return msgspec.structs.replace(step, rows=tuple(map(self._masked, step.rows)))

    def accept(self, request_id: int, token_id: int | None) -> Held:
        """Takes in what was sampled for a request, if anything was."""
        form = self._by_id.get(request_id)
        if form is None or token_id is None:
            return FREE
        form.accept(token_id)
        if form.failure is None:
            return Held(ended=form.ended)
        return Held(
            failure=f"The output can no longer be held to its form: {form.failure} Ask for a simpler "
            "form, or for fewer tokens."
        )

    def _masked(self, row: Row) -> Row:
        form = self._by_id.get(row.request_id) if row.sample else None
        return row if form is None else msgspec.structs.replace(row, allowed=form.mask())
