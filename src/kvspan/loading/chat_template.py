"""Chat templates: a model's way to write a conversation as one text. Knows no tokens and no model.

Templates are programs that come with a checkpoint, so they run in a sandbox. What they may call is what
Hugging Face's `apply_chat_template` gives them.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvspan.errors import ConfigError, ModelError, RequestError, reason_of
from kvspan.loading.template_reading import Message, Reading, read_template

DEFAULT = "default"
WITH_TOOLS = "tool_use"
"""Names of the template for any conversation, and of the one for those with tools."""

_FAILURES = (
    *(TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError),
    *(RecursionError, MemoryError),  # messages nested too deeply, or repeated without end
)
"""What running a program on somebody's messages may end with."""


class ChatTemplate:
    """A chat template, or several by name.

    Args:
        sources: name -> Jinja source.
        where: the file, for errors.
        special_tokens: variables that every template sees: `bos_token`, `eos_token` and so on.
        now: the time that `strftime_now` tells.

    Raises:
        ModelError: a source is no valid Jinja.
    """

    def __init__(
        self,
        sources: Mapping[str, str],
        *,
        where: str,
        special_tokens: Mapping[str, str],
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        environment = _environment(now)
        try:
            self._templates = {name: environment.from_string(text) for name, text in sources.items()}
        except TemplateError as error:
            raise ModelError(f"{where}: the chat template is no valid Jinja: {error}.") from error
        self._sources, self._environment = dict(sources), environment
        self._where = where
        self._special_tokens = dict(special_tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
    ) -> str:
        """Writes a conversation as text.

        Args:
            messages: each with a `role` and what the template asks for, mostly `content`.
            add_generation_prompt: end with the opening of the assistant's turn.
            variables: more that the template may look at, e.g. `tools`.

        Raises:
            RequestError: the template refuses the messages, or cannot be run on them.
            ModelError: there are several templates, and none for this.
        """
        template = self._templates[self._choose(with_tools=bool(variables.get("tools")))]
        # None and not undefined: templates ask `is not none`.
        seen = {"tools": None, "documents": None, **self._special_tokens, **variables}
        seen |= {"messages": messages, "add_generation_prompt": add_generation_prompt}
        try:
            return template.render(seen)
        except _FAILURES as error:
            why = (str(error) or type(error).__name__).removesuffix(".")
            raise RequestError(f"The model's chat template refuses the messages: {why}.") from error

    @cached_property
    def reading(self) -> Reading:
        """What it shows the model; it writes some small conversations to find out."""

        def write(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> str:
            return self.render(messages, add_generation_prompt=True, variables={"tools": tools})

        parsed = [self._environment.parse(source) for source in self._sources.values()]
        names = frozenset().union(*(meta.find_undeclared_variables(tree) for tree in parsed))
        return read_template(write, names)

    def _choose(self, *, with_tools: bool) -> str:
        if with_tools and WITH_TOOLS in self._templates:
            return WITH_TOOLS
        if DEFAULT in self._templates:
            return DEFAULT
        raise ModelError(
            f'{self._where}: no chat template is called "{DEFAULT}" (has {", ".join(self._templates)}); '
            "give one with --chat-template."
        )


def read_chat_template(path: Path) -> str:
    """The Jinja source in the file of `--chat-template`, for before a model is loaded.

    Raises:
        ConfigError: the file cannot be read.
        ModelError: it is no valid Jinja.
    """
    try:
        source = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--chat-template {path} cannot be read: {reason_of(error)}.") from error
    ChatTemplate({DEFAULT: source}, where=f"--chat-template {path}", special_tokens={})
    return source


def _environment(now: Callable[[], datetime]) -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlock]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: now().strftime(form)
    return environment


class _GenerationBlock(Extension):
    """`{% generation %}` marks the assistant's words for training; here it is just its content."""

    tags = {"generation"}  # noqa: RUF012 (the base class declares it so)

    def parse(self, parser: Parser) -> nodes.Node:
        """The block's content, in a scope of its own."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: Jinja's own filter escapes what HTML cannot bear."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _refuse(message: str) -> str:
    raise TemplateError(message)
