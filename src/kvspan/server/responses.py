"""OpenAI's `/v1/responses`, translated: requests to the chat route's words, blocks to output items.

Nothing is stored: each request brings its whole conversation. Knows both sets of names. Knows no engine
but what `Answering` shows of it.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Self

from pydantic import Field, model_validator

from kvspan.errors import RequestError, blaming
from kvspan.server.protocol import Body, ChatRequest, Choice, Priority, one_of, refusal

IGNORED = frozenset(
    {"include", "truncation", "max_tool_calls", "stream_options", "top_logprobs", "prompt_cache_options"}
)
"""Fields that its clients send and that change nothing here."""

ROLES = ("user", "assistant", "system", "developer")
"""Who speaks in an input item."""

NAMES = {
    "prompt": "input",
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "structured_outputs": "text.format",
}
"""Fields of the chat route -> those that clients of this one know."""

ABSENT = {
    "previous_response_id": "nothing is stored; send the whole conversation as input",
    "conversation": "nothing is stored; send the whole conversation as input",
    "background": "nothing is stored; ask for a stream and read it",
    "prompt": "no prompts are stored; send instructions and input",
}


class ResponsesRequest(Body):
    """`POST /v1/responses`."""

    ignored: ClassVar[frozenset[str]] = IGNORED

    model: str | None = None
    input: Annotated[str | list[dict[str, Any]], one_of("a text or a list of items")]
    instructions: str | None = None
    max_output_tokens: Annotated[int | None, Field(ge=1)] = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Choice = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    priority: Priority = 0
    cache_salt: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_absent(cls, values: Any) -> Any:
        for name, instead in ABSENT.items():
            if isinstance(values, Mapping) and values.get(name):
                raise refusal(name, f"{name} is not supported: {instead}")
        return values

    @model_validator(mode="after")
    def _has_input_and_a_format(self) -> Self:
        if not isinstance((self.text or {}).get("format") or {}, Mapping):
            raise refusal("text.format", "text.format must be an object")
        if not isinstance((self.reasoning or {}).get("effort"), str | None):
            raise refusal("reasoning.effort", "reasoning.effort must be a text")
        if not self.input:
            raise refusal("input", "input is empty")
        return self


def to_chat(body: ResponsesRequest) -> ChatRequest:
    """The same conversation in the words of the chat route.

    Raises:
        RequestError: it has something that models here do not read.
    """
    system = [{"role": "system", "content": body.instructions}] if body.instructions else []
    items = [{"role": "user", "content": body.input}] if isinstance(body.input, str) else body.input
    return ChatRequest(
        model=body.model,
        messages=system + _conversation(items),
        max_tokens=body.max_output_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        stream=bool(body.stream),
        tools=_tools(body.tools),
        tool_choice=_choice(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls,
        response_format=_format((body.text or {}).get("format")),
        reasoning_effort=(body.reasoning or {}).get("effort"),
        priority=body.priority,
        cache_salt=body.cache_salt,
    )


def _conversation(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Items as messages. What the model said in several of them is one message: thought, text, calls."""
    found: list[dict[str, Any]] = []
    for i, item in enumerate(items):
        with blaming(f"input[{i}]"):
            _add(item, found, f"input[{i}]")
    return found


def _add(item: Mapping[str, Any], found: list[dict[str, Any]], where: str) -> None:
    """Adds what an item says to the messages."""
    match item.get("type", "message"):
        case "message" if item.get("role") == "assistant":
            said = _of_model(found)
            said["content"] = (said["content"] or "") + _plain(item.get("content"), where)
        case "message":
            role, text = _role(item, where), _plain(item.get("content"), where)
            found.append({"role": role, "content": text})
        case "reasoning":
            _of_model(found)["reasoning_content"] = _thought(item)
        case "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments") or "{}"}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            _of_model(found).setdefault("tool_calls", []).append(call)
        case "function_call_output":
            text = _plain(item.get("output"), where)
            found.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": text})
        case kind:
            sentence = f"{where} has type {str(kind)[:60]!r}, which models here do not read."
            raise RequestError(sentence, param=f"{where}.type")


def _of_model(found: list[dict[str, Any]]) -> dict[str, Any]:
    """The model's message that is being put together."""
    if not found or found[-1]["role"] != "assistant":
        found.append({"role": "assistant", "content": None})
    return found[-1]


def _role(item: Mapping[str, Any], where: str) -> str:
    role = item.get("role")
    if role not in ROLES:
        sentence = f"{where}.role must be one of {', '.join(ROLES)}, got {str(role)[:60]!r}."
        raise RequestError(sentence, param=f"{where}.role")
    return str(role)


def _plain(content: Any, where: str) -> str:
    """The text of a content, which may come in parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(f"{where} must have text, or a list of parts.")
    for part in content:
        if not isinstance(part, Mapping) or not isinstance(part.get("text", part.get("refusal")), str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise RequestError(f"{where} has a part of type {kind!r}; models here read text only.")
    return "\n".join(part.get("text", part.get("refusal")) for part in content)


def _thought(item: Mapping[str, Any]) -> str:
    parts = [*(item.get("content") or ()), *(() if item.get("content") else item.get("summary") or ())]
    return "\n".join(str(part.get("text", "")) for part in parts if isinstance(part, Mapping))


def _tools(tools: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    if not tools:
        return None
    found = []
    for i, tool in enumerate(tools):
        if tool.get("type") != "function":
            raise RequestError(
                f"tools[{i}] has type {tool.get('type')!r}, which only OpenAI itself could run.",
                param=f"tools[{i}].type",
            )
        keys = ("name", "description", "parameters", "strict")
        function = {key: tool[key] for key in keys if tool.get(key) is not None}
        found.append({"type": "function", "function": function})
    return found


def _choice(choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    """The chat route's `tool_choice`, where a function's name lies one level deeper."""
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if choice.get("type") == "allowed_tools":
        listed = choice.get("tools")
        tools = (
            [_choice(each) for each in listed if isinstance(each, dict)]
            if isinstance(listed, list)
            else []
        )
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode"), "tools": tools}}
    raise RequestError(
        f"tool_choice has type {choice.get('type')!r}; it must be a function.", param="tool_choice"
    )


def _format(asked: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The chat route's `response_format`, where a schema lies one level deeper."""
    if asked is None:
        return None
    if asked.get("type") == "json_schema":
        return {"type": "json_schema", "json_schema": {k: v for k, v in asked.items() if k != "type"}}
    return dict(asked)
