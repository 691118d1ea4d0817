"""`kvspan fetch`: installs the weights of a built-in model."""

import argparse

from kvspan.loading.fetch import PACKAGES
from kvspan.loading.fetch import fetch as fetch_model


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument("model", choices=list(PACKAGES), help="which")


def run(arguments: argparse.Namespace) -> int:
    """Runs the command."""
    fetch_model(arguments.model, say=print)
    return 0
