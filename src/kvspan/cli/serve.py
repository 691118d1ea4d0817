"""`kvspan serve`: an OpenAI-compatible server for a model."""

import argparse
import logging

from kvspan.cli.flags import add_engine_flags, add_flags, asked_of
from kvspan.cli.startup import print_choices, print_plan, stderr_console
from kvspan.config.engine import ENGINE_OPTIONS, EngineConfig
from kvspan.config.environment import api_keys
from kvspan.config.server import SERVER_OPTIONS, ServerConfig
from kvspan.engine.messages import Ready
from kvspan.server.serve import serve
from kvspan.server.served import Served


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    add_engine_flags(parser, positional_model=True, serves=True)
    add_flags(parser, SERVER_OPTIONS)


def run(arguments: argparse.Namespace) -> int:
    """Runs the command until a signal ends it."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    engine = EngineConfig.from_mapping(asked_of(arguments, ENGINE_OPTIONS, beside=SERVER_OPTIONS))
    asked = asked_of(arguments, SERVER_OPTIONS, beside=ENGINE_OPTIONS)
    config = ServerConfig(**{"api_key": api_keys(), **asked})
    if config.access_log:
        logging.getLogger("uvicorn.access").setLevel(logging.INFO)
    console = stderr_console()

    def listening(url: str, ready: Ready, served: Served) -> None:
        print_plan(console, ready.plan, ready.reports)
        console.print(f"  {served.styles.why}", markup=False, style="dim")
        console.print(f"Serving on {url}/v1 (Ctrl-C drains, a second one ends)", markup=False)

    return serve(
        engine,
        config,
        chosen=lambda resolved: print_choices(console, resolved),
        listening=listening,
    )
