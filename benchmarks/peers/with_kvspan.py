"""kvspan as a contestant: the whole engine, greedy, detokenising; random keys and values."""

import random

import contestant

from kvspan.bench.contender import ROOM_TOKENS, Case, Contender
from kvspan.config.engine import EngineConfig


class Kvspan:
    """One rank, as a user of such a machine is told."""

    def __init__(self, asked: contestant.argparse.Namespace) -> None:
        options = {
            "model": asked.model,
            "max_model_len": asked.max_len,
            "max_num_seqs": asked.max_seqs,
            "num_threads": asked.threads,
            "kv_cache_memory": f"{asked.kv_bytes}b",
            "load_format": "dummy" if asked.dummy else "auto",
        }
        self._contender = Contender(EngineConfig.from_mapping(options))
        self._num_steps = asked.new_tokens - ROOM_TOKENS
        self._source, self._seed = random.Random(1), 0

    def prepare(self, context: int, batch: int) -> None:
        """See `Contestant.prepare`."""
        self._seed += batch
        self._contender.fill(Case(context, batch), num_steps=self._num_steps, seed=self._seed)
        self._contender.start()

    def step(self) -> None:
        """See `Contestant.step`."""
        self._contender.step()

    def drop(self) -> None:
        """See `Contestant.drop`."""
        self._contender.stop()

    def prefill(self, tokens: int) -> None:
        """See `Contestant.prefill`."""
        self._contender.compute(contestant.prompt(tokens, self._source))


if __name__ == "__main__":
    asked = contestant.arguments()
    contestant.serve(lambda: Kvspan(asked))
