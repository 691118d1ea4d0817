"""`kvspan generate`: completes a prompt or answers a message, token by token."""

import argparse
import sys
from pathlib import Path
from typing import Any

from kvspan.cli.flags import add_engine_flags, engine_config
from kvspan.cli.json_flag import JsonOutput, add_json_flag
from kvspan.cli.startup import print_capacity, print_choices, stderr_console
from kvspan.cli.streaming import stream
from kvspan.engine.generation import Prompt
from kvspan.engine.llm import LLM
from kvspan.errors import ConfigError, reason_of
from kvspan.loading.chat_template import read_chat_template
from kvspan.request import SamplingParams

DEFAULT_MAX_TOKENS = 256

SAMPLING: dict[str, tuple[type, str]] = {
    "max_tokens": (int, f"tokens of output at the most (default: the model's, or {DEFAULT_MAX_TOKENS})"),
    "min_tokens": (int, "no end of text before this many tokens"),
    "temperature": (float, "0 always takes the most probable token (default: the model's, or 1)"),
    "top_k": (int, "choose among this many most probable tokens; 0 = all"),
    "top_p": (float, "choose among the most probable tokens that together have this probability"),
    "min_p": (float, "leave out tokens less probable than this times the most probable one"),
    "presence_penalty": (float, "taken off the logit of a token that the output has"),
    "frequency_penalty": (float, "the same for each time that it has it"),
    "repetition_penalty": (float, "divides the logit of a token that prompt or output has"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    prompt = parser.add_argument_group("Prompt")
    source = prompt.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", metavar="TEXT", help="the prompt")
    source.add_argument("--prompt-file", metavar="FILE", help="a file with the prompt; - = stdin")
    prompt.add_argument("--chat", action="store_true", help="the prompt is a message to be answered")
    prompt.add_argument("--system", metavar="TEXT", help="with --chat: the system message")
    prompt.add_argument(
        "--chat-template", metavar="FILE", type=Path, help="with --chat: a Jinja template of your own"
    )
    add_json_flag(prompt)
    sampling = parser.add_argument_group(
        "Sampling", "What is left out is as --generation-config has it; the seed is --seed."
    )
    for name, (kind, help_line) in SAMPLING.items():
        flag = f"--{name.replace('_', '-')}"
        metavar = "N" if kind is int else "X"
        sampling.add_argument(
            flag, type=kind, metavar=metavar, default=argparse.SUPPRESS, help=help_line
        )
    sampling.add_argument("--stop", action="append", default=[], metavar="TEXT", help="ends the output")
    sampling.add_argument("--ignore-eos", action="store_true", help="go on after an end of text")
    add_engine_flags(parser, positional_model=True)


def run(arguments: argparse.Namespace) -> int:
    """Runs the command."""
    json = JsonOutput(arguments)
    asked, text = _sampling(arguments), _prompt_text(arguments)
    config = engine_config(arguments)
    if (arguments.system or arguments.chat_template) and not arguments.chat:
        raise ConfigError("--system and --chat-template go with --chat.")
    template = None if arguments.chat_template is None else read_chat_template(arguments.chat_template)
    console = stderr_console()
    with LLM.from_config(config, told=lambda resolved: print_choices(console, resolved)) as llm:
        print_capacity(console, llm.engine.core)
        prompt = _prompt(llm, arguments, text, template)
        params = SamplingParams.from_mapping(
            {"max_tokens": DEFAULT_MAX_TOKENS, **llm.resolved.sampling_defaults, **asked}
        )
        if json.is_alone:
            (result,) = llm.generate([prompt], params)
        else:
            result = stream(llm, prompt, params, console=console).result
        json.write(result)
    return 0


def _sampling(arguments: argparse.Namespace) -> dict[str, Any]:
    """The sampling parameters that were typed; refused here if they cannot be, before anything runs."""
    typed = {name: value for name, value in vars(arguments).items() if name in SAMPLING}
    asked = {**typed, "stop": arguments.stop, "ignore_eos": arguments.ignore_eos}
    SamplingParams.from_mapping({"max_tokens": DEFAULT_MAX_TOKENS, **asked})
    return asked


def _prompt_text(arguments: argparse.Namespace) -> str:
    if arguments.prompt is not None:
        return str(arguments.prompt)
    if arguments.prompt_file == "-":
        if sys.stdin is None:
            raise ConfigError("--prompt-file - reads stdin, which is closed.")
        return sys.stdin.read()
    try:
        return Path(arguments.prompt_file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = reason_of(error)
        raise ConfigError(f"--prompt-file {arguments.prompt_file} cannot be read: {why}.") from error


def _prompt(llm: LLM, arguments: argparse.Namespace, text: str, template: str | None) -> Prompt:
    if not arguments.chat:
        return text
    messages = [{"role": "user", "content": text}]
    if arguments.system is not None:
        messages.insert(0, {"role": "system", "content": arguments.system})
    return llm.chat_prompt(messages, chat_template=template)
