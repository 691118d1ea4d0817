"""From conversations and texts to token ids, off the event loop when they are long."""

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from kvspan.errors import RequestError, blaming
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
    plain = []
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        with blaming(f"{where}.role"):
            _check_role(message.get("role"), where, tokenizer.chat_template_source)
        with blaming(f"{where}.content"):
            plain.append(_plain(message, where))
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


def _plain(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A message with its content as one text, and arguments of calls as objects."""
    role = message["role"]
    plain = dict(message)
    if role == "developer":  # the newer word for the same
        plain["role"] = "system"
    plain["content"] = _text(message.get("content"), where)
    if plain["content"] is None and role in ("user", "system", "developer"):
        raise RequestError(f"{where} has no content.")
    if calls := message.get("tool_calls"):
        with blaming(f"{where}.tool_calls"):
            plain["tool_calls"] = _calls(calls, where)
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


def _calls(calls: object, where: str) -> list[dict[str, Any]]:
    """Tool calls with their arguments as objects: templates write them as JSON themselves."""
    if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
        raise RequestError(f"{where}.tool_calls must be a list of calls.")
    found = []
    for call in calls:
        function = call.get("function")
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise RequestError(f"{where}.tool_calls has a call without a function's name.")
        arguments = function.get("arguments") or "{}"
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except (ValueError, RecursionError):
                raise RequestError(f"{where}.tool_calls has arguments that are no JSON.") from None
        found.append({**call, "function": {**function, "arguments": arguments}})
    return found


def _left_open(text: str, last: Mapping[str, Any]) -> str:
    """The conversation up to the end of its last message's content."""
    content = str(last["content"] or "").rstrip()
    end = text.rfind(content)
    if not content or end < 0:
        raise RequestError("continue_final_message: the template does not show the last message.")
    return text[: end + len(content)]
