"""What takes an answer apart: thoughts first, then calls, the rest is content.

Fulfils `parsing.AnswerParser` by a reasoning splitter and a tool-call parser, of which either may be
missing. Knows no HTTP and no engine.
"""

from collections.abc import Iterator, Sequence

from kvspan.server.parsing import Addition
from kvspan.server.reasoning.split import ReasoningSplitter, Split
from kvspan.server.replies import ToolCall, ToolFunction
from kvspan.server.tools.contract import Arguments, CallBegins, CallBroken, Content, Delta, ToolParser


class AnswerReader:
    """One output's thoughts, calls and content.

    Args:
        reasoning: splits thoughts off; None = there are none.
        tools: finds calls in what follows; None = none are looked for.
        whole: the answer goes out in one piece, so that a call is told when it is whole, and the text of
            one that breaks is content; in a stream its beginning has been told, as a call.
        tell_reasoning: whether thoughts are told; they are thought anyway.
    """

    def __init__(
        self,
        *,
        reasoning: ReasoningSplitter | None = None,
        tools: ToolParser | None = None,
        whole: bool = False,
        tell_reasoning: bool = True,
    ) -> None:
        self._reasoning, self._tools = reasoning, tools
        self._tell_reasoning = tell_reasoning
        self._calls = _WholeCalls() if whole else _CallParts()
        self.num_reasoning_tokens = 0

    @property
    def made_calls(self) -> bool:
        """Whether there is a call that is not broken."""
        return self._calls.num_calls > 0

    def push(self, text: str, token_ids: Sequence[int]) -> Sequence[Addition]:
        """What a further piece of the output adds."""
        if self._reasoning is None:
            return list(self._of_content(text))
        split = self._reasoning.push(text)
        if not self._reasoning.in_content:
            self.num_reasoning_tokens += len(token_ids)
        return list(self._of_split(split))

    def finish(self) -> Sequence[Addition]:
        """What was held back; nothing follows."""
        additions = [] if self._reasoning is None else list(self._of_split(self._reasoning.finish()))
        if self._tools is not None:
            additions += self._calls.of(self._tools.finish())
        return additions + list(self._calls.end())

    def _of_split(self, split: Split) -> Iterator[Addition]:
        if split.reasoning and self._tell_reasoning:
            yield Addition(reasoning=split.reasoning)
        yield from self._of_content(split.content)

    def _of_content(self, text: str) -> Iterator[Addition]:
        if not text:
            return
        if self._tools is None:
            yield Addition(text)
        else:
            yield from self._calls.of(self._tools.push(text))


class _CallParts:
    """Calls as they come."""

    def __init__(self) -> None:
        self.num_calls = 0

    def of(self, deltas: Sequence[Delta]) -> Iterator[Addition]:
        """What deltas of a tool parser add to the answer."""
        for delta in deltas:
            match delta:
                case Content(text):
                    yield Addition(text)
                case CallBegins(index, call_id, name):
                    self.num_calls += 1
                    function = ToolFunction(name=name, arguments="")
                    part = ToolCall(index=index, id=call_id, type="function", function=function)
                    yield Addition(tool_calls=(part,))
                case Arguments(index, fragment):
                    part = ToolCall(index=index, function=ToolFunction(arguments=fragment))
                    yield Addition(tool_calls=(part,))
                case CallBroken():
                    self.num_calls -= 1  # what there is of it has been told, and is not told twice

    def end(self) -> Sequence[Addition]:
        """What is left to add at the end."""
        return ()


class _WholeCalls:
    """Calls once they are whole, numbered without those that broke."""

    def __init__(self) -> None:
        self.num_calls = 0
        self._begun: CallBegins | None = None
        self._arguments: list[str] = []

    def of(self, deltas: Sequence[Delta]) -> Iterator[Addition]:
        """What deltas of a tool parser add to the answer."""
        for delta in deltas:
            match delta:
                case Content(text):
                    yield from self.end()
                    yield Addition(text)
                case CallBegins():
                    yield from self.end()
                    self._begun = delta
                case Arguments(fragment=fragment):
                    self._arguments.append(fragment)
                case CallBroken(text=text):
                    self._begun = None
                    self._arguments.clear()
                    yield Addition(text)

    def end(self) -> Sequence[Addition]:
        """The call that has begun, which is whole now."""
        if self._begun is None:
            return ()
        call = ToolCall(
            index=self.num_calls,
            id=self._begun.call_id,
            type="function",
            function=ToolFunction(name=self._begun.name, arguments="".join(self._arguments)),
        )
        self.num_calls += 1
        self._begun = None
        self._arguments.clear()
        return (Addition(tool_calls=(call,)),)
