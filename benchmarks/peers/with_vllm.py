"""vLLM on CPU as a contestant: its engine in this process, its own connector fills the cache.

`DecodeBenchConnector` fills it with one value for all keys, and hands prompts over as computed.
"""

import os
import random

import contestant

_SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


class Vllm:
    """An `LLMEngine`."""

    def __init__(self, asked: contestant.argparse.Namespace) -> None:
        os.environ.update(
            _SETTINGS,
            VLLM_CPU_KVCACHE_SPACE=str(asked.kv_bytes // 2**30 + 1),
            VLLM_CPU_OMP_THREADS_BIND=f"0-{asked.threads - 1}",
        )
        from vllm import EngineArgs, LLMEngine, SamplingParams
        from vllm.config import KVTransferConfig

        connector = KVTransferConfig(kv_connector="DecodeBenchConnector", kv_role="kv_both")
        self._engine = LLMEngine.from_engine_args(
            EngineArgs(
                model=asked.model,
                load_format="dummy" if asked.dummy else "auto",
                dtype="bfloat16",
                max_model_len=asked.max_len,
                max_num_seqs=asked.max_seqs,
                enable_prefix_caching=False,
                skip_tokenizer_init=True,
                seed=0,
                kv_transfer_config=connector,
            )
        )
        self._params = SamplingParams(
            max_tokens=asked.new_tokens, temperature=0, ignore_eos=True, detokenize=False
        )
        self._source, self._num_requests = random.Random(0), 0
        self._mine: list[str] = []

    def prepare(self, context: int, batch: int) -> None:
        """See `Contestant.prepare`."""
        for _ in range(batch):
            self._num_requests += 1
            self._mine.append(str(self._num_requests))
            ids = contestant.prompt(context, self._source)
            self._engine.add_request(self._mine[-1], {"prompt_token_ids": ids}, self._params)
        counts = [0]
        while len(counts) < batch or min(counts) < contestant.WARM_TOKENS:
            counts = [len(output.outputs[0].token_ids) for output in self._engine.step()]

    def step(self) -> None:
        """See `Contestant.step`."""
        outputs = self._engine.step()
        assert len(outputs) == len(self._mine), "every sequence decodes in every step"

    def drop(self) -> None:
        """See `Contestant.drop`."""
        self._engine.abort_request(self._mine)
        self._mine = []
        while self._engine.has_unfinished_requests():
            self._engine.step()

    def prefill(self, tokens: int) -> None:
        """See `Contestant.prefill`."""
        raise NotImplementedError("the connector that fills the cache also skips every prefill")


if __name__ == "__main__":
    asked = contestant.arguments()
    contestant.serve(lambda: Vllm(asked))
