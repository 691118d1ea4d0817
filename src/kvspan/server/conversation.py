"""A chat request made ready: its prompt, how its tokens are chosen, and what will take its answer apart.

Every route that speaks of messages comes down to this. Knows the model's styles. Knows no replies.
"""

import asyncio
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from uuid import uuid4

import msgspec

from kvspan.errors import blaming
from kvspan.loading.template_reading import Reading
from kvspan.loading.tokenizer import Tokenizer
from kvspan.request import SamplingParams
from kvspan.server.answers import AnswerReader
from kvspan.server.errors import renamed
from kvspan.server.forms import form_field, form_notes
from kvspan.server.parsing import AnswerParser
from kvspan.server.prompts import encode, render
from kvspan.server.protocol import ChatRequest, TokenizeRequest
from kvspan.server.reasoning.split import Beginning, ReasoningSplitter, ReasoningStyle
from kvspan.server.sampling import chat_params
from kvspan.server.served import Served
from kvspan.server.styles import Styles
from kvspan.server.tools.choice import ToolChoice, read_choice
from kvspan.structured import StructuredOutputsParams

EFFORT = "reasoning_effort"
"""What chat templates call it, as OpenAI does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """A chat request, ready for the engine.

    Args:
        prompt_ids: tokens of the conversation.
        params: how tokens are chosen.
        parser: makes what takes one output apart.
        notes: sentences on what is not done as it was asked.
    """

    prompt_ids: list[int]
    params: SamplingParams
    parser: Callable[[], AnswerParser]
    notes: tuple[str, ...]


async def prepare(here: Served, body: ChatRequest) -> Conversation:
    """Makes a chat request ready.

    Args:
        here: what is served.
        body: of the request.

    Raises:
        RequestError: a message, a tool, a form or a parameter is refused; says why.
    """
    tokenizer, styles = here.chat_tokenizer(body.chat_template), here.styles
    choice = read_choice(body.tools, body.tool_choice, parallel=body.parallel_tool_calls)
    if not (choice.forced or here.config.enable_auto_tool_choice):
        choice = replace(choice, callable=False)
    text = await write(here, tokenizer, body)
    begins = Beginning.CONTENT if styles.reasoning is None else styles.reasoning.beginning(text)
    with renamed({"logprobs": "top_logprobs"}):
        asked = chat_params(body, here.default_sampling)
    params = _with_form(asked, choice, styles, begins)
    if (choice.callable or styles.reasoning) and _marks_are_special(styles, choice, tokenizer):
        params = msgspec.structs.replace(params, skip_special_tokens=False)

    field = "tools" if choice.forced else form_field(body)
    notes: tuple[str, ...] = ()
    if params.structured_outputs is not None:
        with blaming(field):
            await asyncio.to_thread(here.llm.check_form, params)
        notes = await form_notes(params.structured_outputs, field)

    def parser() -> AnswerParser:
        splitter = _splitter(styles.reasoning, begins)
        calls = styles.tools.parser(choice.tools, new_id=_call_id) if choice.callable else None
        return AnswerReader(
            reasoning=splitter,
            tools=calls,
            whole=not body.stream,
            tell_reasoning=body.include_reasoning,
        )

    with blaming("messages"):
        prompt_ids = await encode(tokenizer, text)
    notes += tuple(_unread(body, choice, tokenizer.chat_template_reading))
    return Conversation(prompt_ids=prompt_ids, params=params, parser=parser, notes=notes)


async def write(here: Served, tokenizer: Tokenizer, body: ChatRequest | TokenizeRequest) -> str:
    """A request's conversation as text, written off the event loop.

    Args:
        here: what is served.
        tokenizer: with the template.
        body: of the request; it has messages.

    Raises:
        RequestError: a message is refused, or the template takes too long.
    """
    assert body.messages is not None, "there is a conversation"
    work = partial(
        render,
        tokenizer,
        body.messages,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        tools=body.tools,
        template_kwargs=_variables(body),
    )
    return await here.writers.write(work)


def _variables(body: ChatRequest | TokenizeRequest) -> Mapping[str, Any]:
    """What the template may look at beside the messages; `chat_template_kwargs` win."""
    effort = {} if body.reasoning_effort is None else {EFFORT: body.reasoning_effort}
    return {**effort, **(body.chat_template_kwargs or {})}


def _unread(body: ChatRequest, choice: ToolChoice, reading: Reading) -> Iterator[str]:
    """Says what of a request its prompt does not have, since the chat template has no place for it."""
    if choice.tools and not reading.shows_tools:
        forced = "; it must call one all the same" if choice.forced else ""
        yield f"The model is told of no tools: its chat template has no place for them{forced}."
    if not reading.shows_calls and any(message.get("tool_calls") for message in body.messages):
        yield "The model does not see calls of earlier turns: its chat template has no place for them."
    if body.reasoning_effort is not None and EFFORT not in reading.variables:
        yield f"{EFFORT} changes nothing: the model's chat template does not look at it."


def _with_form(
    params: SamplingParams, choice: ToolChoice, styles: Styles, begins: Beginning
) -> SamplingParams:
    """The parameters with the form that the answer is held to, after the thought if there is one."""
    form = params.structured_outputs
    if choice.forced:
        form = StructuredOutputsParams(grammar=styles.tools.lark(choice.forced, several=choice.several))
    if form is None:
        return params
    if styles.reasoning is not None and begins is not Beginning.CONTENT:
        opening = styles.reasoning.opening if begins is Beginning.OPEN else None
        form = msgspec.structs.replace(form, after=styles.reasoning.closing, opening=opening)
    return msgspec.structs.replace(params, structured_outputs=form)


def _splitter(style: ReasoningStyle | None, begins: Beginning) -> ReasoningSplitter | None:
    if style is None or begins is Beginning.CONTENT:
        return None
    return ReasoningSplitter(style, inside=begins is Beginning.INSIDE)


def _marks_are_special(styles: Styles, choice: ToolChoice, tokenizer: Tokenizer) -> bool:
    """Whether decoding would leave out the marks that parsers look for."""
    marks = [*(styles.tools.signs if choice.callable else ())]
    if styles.reasoning is not None:
        marks += [styles.reasoning.opening, styles.reasoning.closing]
    ids = [tokenizer.token_to_id(mark) for mark in marks]
    return any(i is not None and not tokenizer.decode([i], skip_special_tokens=True) for i in ids)


def _call_id() -> str:
    return f"call_{uuid4().hex[:24]}"
