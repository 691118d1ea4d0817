"""The `kvspan` command: finds the command's module, and turns refusals into one sentence and exit 2.

Only the module of the command that was typed is imported, so that `kvspan --help` need not load torch.
"""

import importlib
import io
import os
import sys
from collections.abc import Sequence
from types import ModuleType

from rich.console import Console

import kvspan
from kvspan.cli.flags import FlagParser
from kvspan.errors import ConfigError, KvspanError, ModelError, RequestError

FAILED, REFUSED, INTERRUPTED = 1, 2, 130

COMMANDS = {
    "generate": "complete a prompt, or answer as a chat",
    "serve": "serve a model to OpenAI-compatible clients",
    "check": "compare a layout with one rank, on this model and machine",
    "demo": "ask a small model about a long document, its KV cache spread over ranks",
    "bench": "measure parts of the engine on this machine",
    "trace": "count, make or cut traces of requests",
    "plan": "find a layout for a model and some GPUs, before there are any",
    "doctor": "show which kernels run on this machine, and why",
    "fetch": "install the weights of a built-in model",
}
"""Command -> what it does; each is the module of the same name."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
        arguments: of the command line; None = those of this process.

    Returns:
        Exit code: 0, 1 if what was asked failed, 2 if it was refused, 130 after Ctrl-C.
    """
    typed = sys.argv[1:] if arguments is None else list(arguments)
    _prepare_stdout()
    try:
        module = _module(typed)
        parsed = _parser(module).parse_args(typed)
        assert module is not None, "argparse lets no other command through"
        return int(vars(module)["run"](parsed))
    except (ConfigError, ModelError, RequestError) as refusal:
        return _say(refusal, REFUSED)
    except KvspanError as failure:
        return _say(failure, FAILED)
    except BrokenPipeError:  # `kvspan generate ... | head`: nobody reads on
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except KeyboardInterrupt:
        return INTERRUPTED
    except OSError as failure:  # e.g. the disk that stdout goes to is full
        return _say(KvspanError(f"{failure.strerror or failure}."), FAILED)


def _prepare_stdout() -> None:
    """Makes stdout take any text: it may be closed, or of an encoding that lacks a character."""
    if sys.stdout is None:
        sys.stdout = io.StringIO()  # which nobody reads
    elif isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def _module(typed: Sequence[str]) -> ModuleType | None:
    name = typed[0] if typed else ""
    return importlib.import_module(f"kvspan.cli.{name}") if name in COMMANDS else None


def _parser(module: ModuleType | None) -> FlagParser:
    """A parser that knows all commands, and the flags of the one that was typed."""
    parser = FlagParser(prog="kvspan", description=(kvspan.__doc__ or "").splitlines()[0])
    parser.add_argument("--version", action="version", version=f"kvspan {kvspan.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, help_line in COMMANDS.items():
        usage = f"kvspan {name} [options]"
        command = commands.add_parser(name, help=help_line, description=f"{help_line}.", usage=usage)
        if module is not None and module.__name__.endswith(f".{name}"):
            vars(module)["add_arguments"](command)
    return parser


def _say(error: KvspanError, code: int) -> int:
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    console.print("kvspan:", style="bold red", end=" ")
    console.print(str(error), markup=False)
    return code


if __name__ == "__main__":
    sys.exit(main())
