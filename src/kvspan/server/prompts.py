"""From conversations and texts to token ids, off the event loop when they are long."""

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from kvspan.errors import RequestError, blaming
from kvspan.loading.template_reading import Reading
from kvspan.loading.tokenizer import Tokenizer
from kvspan.unicode import check_unicode

ROLES = ("system", "developer", "user", "assistant", "tool")
"""Who speaks, in OpenAI's words."""

_LONG = 20_000  # characters, or tokens, take some milliseconds, in which every stream would stand still

T = TypeVar("T")


async def encode(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool = True) -> list[int]:
    """Cuts text into tokens.

    Args:
        tokenizer: of the model.
        text: any.
        add_special_tokens: begin with BOS if the model wants it.

    Raises:
        RequestError: the text is no Unicode.
    """
    (ids,) = await encode_all(tokenizer, [text], add_special_tokens=add_special_tokens)
    return ids


async def encode_all(
    tokenizer: Tokenizer, texts: Sequence[str], *, add_special_tokens: bool = True
) -> list[list[int]]:
    """Cuts several texts into tokens; the arguments are those of `encode`."""
    for text in texts:
        check_unicode("The text", text)

    def work() -> list[list[int]]:
        return [tokenizer.encode(text, add_special_tokens=add_special_tokens) for text in texts]

    return await _beside(work, size=sum(map(len, texts)))


async def decode_all(tokenizer: Tokenizer, prompts: Sequence[Sequence[int]]) -> list[str]:
    """The texts of several lists of tokens."""

    def work() -> list[str]:
        return [tokenizer.decode(ids) for ids in prompts]

    return await _beside(work, size=sum(map(len, prompts)))


async def _beside(work: Callable[[], T], *, size: int) -> T:
    """Does it off the event loop, if its size says that it takes long."""
    return await asyncio.to_thread(work) if size > _LONG else work()


def render(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool,
    continue_final_message: bool = False,
    tools: Sequence[Mapping[str, Any]] | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> str:
    """Writes a conversation as the model was taught to read it.

    Args:
        tokenizer: of the model.
        messages: as clients send them.
        add_generation_prompt: open the assistant's turn.
        continue_final_message: leave the last message open, to be gone on with.
        tools: that the model may call.
        template_kwargs: more that the template may look at.

    Raises:
        RequestError: a message is not one that models here read.
    """
    plain, reading = [], tokenizer.chat_template_reading
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        with blaming(f"{where}.role"):
            _check_role(message.get("role"), where, tokenizer.chat_template_source)
        with blaming(f"{where}.content"):
            plain.append(_plain(message, where, reading))
    with blaming("messages"):
        text = tokenizer.apply_chat_template(
            plain,
            add_generation_prompt=add_generation_prompt,
            template_kwargs={**({"tools": tools} if tools else {}), **(template_kwargs or {})},
        )
    with blaming("continue_final_message"):
        return _left_open(text, plain[-1]) if continue_final_message else text


def _check_role(role: object, where: str, template: str) -> None:
    """Refuses a role that is neither OpenAI's nor one that the template speaks of."""
    if role is None:
        raise RequestError(f"{where} has no role: it is one of {', '.join(ROLES)}.")
    if not isinstance(role, str):
        raise RequestError(f"{where}.role must be text, one of {', '.join(ROLES)}, got {role!r:.60}.")
    if role not in ROLES and f"'{role}'" not in template and f'"{role}"' not in template:
        raise RequestError(f"{where}.role must be one of {', '.join(ROLES)}, got {role[:60]!r}.")


def _plain(message: Mapping[str, Any], where: str, reading: Reading) -> dict[str, Any]:
    """A message with its content as one text, and its calls as the template wants them."""
    role = message["role"]
    # Clients write null, or no calls, for what is not there; templates ask whether there is such a key.
    plain = {key: value for key, value in message.items() if value is not None and value != []}
    if role == "developer":  # the newer word for the same
        plain["role"] = "system"
    content = _text(message.get("content"), where)
    if content is None and role in ("user", "system", "developer"):
        raise RequestError(f"{where} has no content.")
    calls = message.get("tool_calls")
    # Some templates know by None that a turn only calls; others write the content whatever it is.
    plain["content"] = "" if content is None and not (calls and reading.takes_null) else content
    if calls:
        with blaming(f"{where}.tool_calls"):
            plain["tool_calls"] = _calls(calls, where, as_objects=reading.takes_objects)
    return plain


def _text(content: object, where: str) -> str | None:
    """The text of a content, which may come in parts."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(f"{where}.content must be text or a list of parts.")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        text = part.get("text", part.get("refusal")) if isinstance(part, Mapping) else None
        if kind not in ("text", "input_text", "output_text", "refusal"):
            raise RequestError(
                f"{where}.content has a part of type {kind!r}; models here read text only."
            )
        if not isinstance(text, str):
            raise RequestError(f"{where}.content has a part of type {kind!r} without text.")
        texts.append(text)
    return "\n".join(texts)


def _calls(calls: object, where: str, *, as_objects: bool) -> list[dict[str, Any]]:
    """Tool calls with arguments as objects, which most templates write as JSON, or as text."""
    if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
        raise RequestError(f"{where}.tool_calls must be a list of calls.")
    found = []
    for call in calls:
        function = call.get("function")
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise RequestError(f"{where}.tool_calls has a call without a function's name.")
        arguments: Any = function.get("arguments") or "{}"
        if as_objects and isinstance(arguments, str):
            arguments = _parsed(arguments, where)
        elif not as_objects and not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        found.append({**call, "function": {**function, "arguments": arguments}})
    return found


def _parsed(arguments: str, where: str) -> Any:
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        raise RequestError(f"{where}.tool_calls has arguments that are no JSON.") from None


def _left_open(text: str, last: Mapping[str, Any]) -> str:
    """The conversation up to the end of its last message's content."""
    content = str(last["content"] or "").rstrip()
    end = text.rfind(content)
    if not content or end < 0:
        raise RequestError("continue_final_message: the template does not show the last message.")
    return text[: end + len(content)]
