"""What clients send: the bodies of OpenAI-compatible requests, with the extensions of the field.

A field that nobody here knows is refused by name, so that nothing is asked in vain. Knows no engine and
no tokenizer.
"""

from collections.abc import Callable
from difflib import get_close_matches
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, WrapValidator, model_validator
from pydantic_core import PydanticCustomError

IGNORED = {
    "user": "who asks makes no difference",
    "metadata": "nothing is stored",
    "store": "nothing is stored",
    "service_tier": "there is one tier; see priority",
    "safety_identifier": "who asks makes no difference",
    "prompt_cache_key": "prefixes are found by their tokens; see cache_salt",
    "prompt_cache_retention": "prefixes stay until their room is needed",
    "verbosity": "models here have no such setting",
    "modalities": "text is what there is",
    "request_id": "the server makes ids",
    "rid": "the server makes ids",
    "length_penalty": "there is no beam search",
    "early_stopping": "there is no beam search",
    "spaces_between_special_tokens": "the tokenizer decides",
    "add_special_tokens_to_output": "see skip_special_tokens",
    "detokenize": "text is always made",
}
"""Fields that clients send by habit and that change nothing here, and why."""

REFUSED = {
    "best_of": "ask for n outputs and choose among them",
    "use_beam_search": "there is no beam search; ask for n outputs",
    "suffix": "models here complete text; write the prompt in the model's own infilling format",
    "functions": "use tools",
    "function_call": "use tool_choice",
    "audio": "models here write text only",
    "prediction": "there is no speculative decoding",
    "web_search_options": "there is no search; give the model a tool",
    "bad_words": "bias their tokens with logit_bias -100",
    "allowed_token_ids": "raise them with logit_bias",
    "logits_processors": "use logit_bias and the penalties",
    "truncate_prompt_tokens": "cut the prompt before it is sent",
    "prompt_embeds": "send text or token ids",
    "documents": "put them into a message",
    "mm_processor_kwargs": "models here read text only",
    "kv_transfer_params": "prefill and decode run in one instance",
    "guided_decoding_backend": "there is one library; leave it out",
    "regex": 'use structured_outputs: {"regex": ...}',
    "ebnf": 'use structured_outputs: {"grammar": ...}, in Lark\'s syntax or GBNF',
    "json_schema": 'use response_format of type json_schema, or structured_outputs: {"json": ...}',
    "separate_reasoning": "thoughts always come apart, as reasoning_content; include_reasoning: false "
    "leaves them out",
    "guided_whitespace_pattern": "use structured_outputs with whitespace_pattern",
}
"""Fields of other servers that are not there, and what to use instead."""


def refusal(param: str, sentence: str) -> PydanticCustomError:
    """What a body's own rules raise.

    Args:
        param: the field that is to blame.
        sentence: why, without a full stop.
    """
    return PydanticCustomError("refused", "{sentence}", {"sentence": sentence, "param": param})


def one_of(kinds: str) -> WrapValidator:
    """Of a field that takes several kinds: what is none of them is told all, and not the first alone.

    Args:
        kinds: to follow "must be".
    """

    def check(value: Any, inner: Callable[[Any], Any]) -> Any:
        try:
            return inner(value)
        except ValidationError:
            raise PydanticCustomError("kinds", "must be {kinds}", {"kinds": kinds}) from None

    return WrapValidator(check)


class Body(BaseModel):
    """A request's body: strict in kinds and in names."""

    ignored: ClassVar[frozenset[str]] = frozenset()
    """More fields that clients of a route send and that change nothing here."""

    model_config = ConfigDict(
        extra="allow", strict=True, json_schema_extra={"additionalProperties": False}
    )

    @model_validator(mode="after")
    def _refuse_unknown(self) -> Self:
        for name, value in (self.model_extra or {}).items():
            if name in IGNORED or name in self.ignored or value is None:
                continue
            if name in REFUSED:
                raise refusal(name, f"{name} is not supported: {REFUSED[name]}")
            close = get_close_matches(name, type(self).model_fields, n=1)
            hint = f"did you mean {close[0]}?" if close else "docs/api.md lists those that there are"
            raise refusal(name, f"there is no field {name}: {hint}")
        return self


class StreamOptions(Body):
    """What a stream carries besides text."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


Stop = Annotated[
    str | list[str] | None,
    Field(description="a string or several that end the output"),
    one_of("a text or a list of texts"),
]

Priority = Annotated[int, Field(ge=-(2**63), lt=2**63, description="the lower value runs first")]


class Sampled(Body):
    """How tokens are chosen, and how they are sent; the same for both kinds of completion."""

    model: str | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: Stop = None
    stop_token_ids: list[int] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: Priority = 0
    cache_salt: str | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    structured_outputs: dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None
    guided_json: Annotated[str | dict[str, Any] | None, one_of("a JSON schema")] = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None

    @model_validator(mode="after")
    def _options_go_with_streams(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise refusal("stream_options", "stream_options goes with stream: true")
        return self


Choice = Annotated[str | dict[str, Any] | None, one_of("a text or an object")]
"""What is called; see `tools.choice`."""


class CompletionRequest(Sampled):
    """`POST /v1/completions`."""

    prompt: Annotated[
        str | list[int] | list[str] | list[list[int]],
        one_of("a text, a list of texts, a list of token ids or a list of such lists, all of one kind"),
    ]
    echo: bool | None = None
    logprobs: int | None = None
    add_special_tokens: bool = True


class ChatRequest(Sampled):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    max_completion_tokens: Annotated[int | None, Field(ge=1)] = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Choice = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    include_reasoning: bool = True
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    echo: Literal[False] | None = None

    @model_validator(mode="after")
    def _one_way_to_end(self) -> Self:
        if self.continue_final_message and self.add_generation_prompt:
            raise refusal(
                "continue_final_message",
                "continue_final_message and add_generation_prompt exclude each other: set one to false",
            )
        if self.top_logprobs is not None and not self.logprobs:
            raise refusal("top_logprobs", "top_logprobs goes with logprobs: true")
        return self

    @property
    def asked_tokens(self) -> tuple[str, int | None]:
        """The field that bounds the answer, and its value."""
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return "max_tokens", self.max_tokens


class TokenizeRequest(Body):
    """`POST /tokenize`: of a prompt or of a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[dict[str, Any]], Field(min_length=1)] | None = None
    tools: list[dict[str, Any]] | None = None
    reasoning_effort: str | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise refusal("prompt", "give one of prompt and messages")
        return self


class DetokenizeRequest(Body):
    """`POST /detokenize`."""

    model: str | None = None
    tokens: list[int]
