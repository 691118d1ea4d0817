"""Flags that say how a trace file is to be understood, for every command that reads one."""

import argparse

from kvspan.trace.mooncake import ReadOptions
from kvspan.trace.row import BLOCK_TOKENS


def add_trace_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags under a heading of their own."""
    group = parser.add_argument_group("Trace files")
    group.add_argument(
        "--trace-block-size",
        type=int,
        default=BLOCK_TOKENS,
        metavar="TOKENS",
        help=f"tokens that an id in hash_ids stands for; a scaled trace has fewer ({BLOCK_TOKENS})",
    )
    group.add_argument(
        "--timestamp-unit", default="ms", metavar="UNIT", help="of timestamps: ms or s (ms)"
    )
    group.add_argument(
        "--allow-prefix-hashes",
        action="store_true",
        help="rows may have ids for a prefix only; what follows is taken to be theirs alone",
    )
    group.add_argument(
        "--skip-bad", action="store_true", help="leave bad lines out and count them, instead of refusing"
    )


def read_options(arguments: argparse.Namespace) -> ReadOptions:
    """What the flags say.

    Raises:
        ConfigError: a value is out of its range.
    """
    return ReadOptions(
        block_tokens=arguments.trace_block_size,
        timestamp_unit=arguments.timestamp_unit,
        allow_prefix_hashes=arguments.allow_prefix_hashes,
        skip_bad=arguments.skip_bad,
    )
