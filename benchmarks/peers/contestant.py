"""How an engine takes part in benchmarks/peers.py. Knows no engine; needs the standard library alone.

Orders come as JSON lines on stdin, one answer to each goes to stdout; what engines print goes to stderr.

    {"do": "prepare", "context": 512, "batch": 8}   sequences whose next steps only decode
    {"do": "decode", "steps": 24}                   -> {"seconds": [of each step]}
    {"do": "drop"}                                  ends the sequences
    {"do": "prefill", "tokens": 4096}               -> {"seconds": [until its first token]}

An answer with "error" says why there is none.
"""

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Callable
from typing import Protocol

WARM_TOKENS = 3
"""Tokens that every sequence has before `prepare` answers."""


class Contestant(Protocol):
    """An engine with a model in it."""

    def prepare(self, context: int, batch: int) -> None:
        """Starts `batch` sequences over `context` tokens each, and has them all decode."""
        ...

    def step(self) -> None:
        """One step, in which each sequence gets a token."""
        ...

    def drop(self) -> None:
        """Ends the sequences."""
        ...

    def prefill(self, tokens: int) -> None:
        """From a new prompt to its first token."""
        ...


def arguments() -> argparse.Namespace:
    """What peers.py tells every contestant."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model", help="as the engine reads it")
    parser.add_argument("--max-len", type=int, required=True, help="tokens of a sequence")
    parser.add_argument(
        "--new-tokens", type=int, required=True, help="room of a sequence beyond its context"
    )
    parser.add_argument("--max-seqs", type=int, required=True, help="sequences at a time")
    parser.add_argument("--kv-bytes", type=int, required=True, help="room that the largest case needs")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dummy", action="store_true", help="random weights")
    return parser.parse_args()


def prompt(length: int, source: random.Random) -> list[int]:
    """Random token ids that every model has."""
    return [source.randrange(100, 30000) for _ in range(length)]


def serve(make: Callable[[], Contestant]) -> None:
    """Makes the engine, says so, and obeys until stdin ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever an engine prints
    start = time.perf_counter()
    contestant = make()
    print(json.dumps({"seconds": [time.perf_counter() - start]}), file=answers)
    for line in sys.stdin:
        try:
            answer = {"seconds": _obey(contestant, json.loads(line))}
        except Exception as error:  # noqa: BLE001  (engines refuse in ways of their own)
            answer = {"error": f"{type(error).__name__}: {error}"[:300]}
        print(json.dumps(answer), file=answers)


def _obey(contestant: Contestant, order: dict) -> list[float]:
    match order["do"]:
        case "prepare":
            return [_timed(lambda: contestant.prepare(order["context"], order["batch"]))]
        case "decode":
            return [_timed(contestant.step) for _ in range(order["steps"])]
        case "drop":
            return [_timed(contestant.drop)]
        case "prefill":
            return [_timed(lambda: contestant.prefill(order["tokens"]))]
        case unknown:
            raise ValueError(f"no order is called {unknown}")


def _timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
