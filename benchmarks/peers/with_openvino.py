"""OpenVINO GenAI as a contestant: its continuous batching pipeline; prompts are prefilled."""

import random

import contestant
import numpy as np

_CHUNK_TOKENS = 2048


class OpenVino:
    """A `ContinuousBatchingPipeline`."""

    def __init__(self, asked: contestant.argparse.Namespace) -> None:
        import openvino_genai

        scheduling = openvino_genai.SchedulerConfig()
        scheduling.cache_size = asked.kv_bytes // 2**30 + 1
        scheduling.max_num_batched_tokens = _CHUNK_TOKENS
        scheduling.max_num_seqs = asked.max_seqs
        scheduling.enable_prefix_caching = False
        scheduling.dynamic_split_fuse = True
        device = {
            "INFERENCE_PRECISION_HINT": "bf16",
            "KV_CACHE_PRECISION": "bf16",
            "INFERENCE_NUM_THREADS": asked.threads,
            "NUM_STREAMS": 1,
        }
        self._genai = openvino_genai
        self._pipe = openvino_genai.ContinuousBatchingPipeline(asked.model, scheduling, "CPU", device)
        self._new_tokens, self._source, self._num_requests = asked.new_tokens, random.Random(0), 0
        self._handles = []
        self.prefill(64)

    def prepare(self, context: int, batch: int) -> None:
        """See `Contestant.prepare`."""
        meanwhile = batch * -(-context // _CHUNK_TOKENS)  # the first decode while the last are read
        self._handles = [self._add(context, self._new_tokens + meanwhile) for _ in range(batch)]
        counts = [0] * batch
        while min(counts) < contestant.WARM_TOKENS:
            self._pipe.step()
            for i, handle in enumerate(self._handles):
                counts[i] += self._read(handle)

    def step(self) -> None:
        """See `Contestant.step`."""
        self._pipe.step()
        got = [self._read(handle) for handle in self._handles]
        assert all(got), "every sequence decodes in every step"

    def drop(self) -> None:
        """See `Contestant.drop`."""
        for handle in self._handles:
            handle.stop()
        self._handles = []
        while self._pipe.has_non_finished_requests():
            self._pipe.step()

    def prefill(self, tokens: int) -> None:
        """See `Contestant.prefill`."""
        handle = self._add(tokens, 1)
        while not self._read(handle):
            self._pipe.step()
        while self._pipe.has_non_finished_requests():
            self._pipe.step()

    def _add(self, length: int, num_new: int):
        import openvino

        config = self._genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = num_new
        config.ignore_eos, config.do_sample = True, False
        self._num_requests += 1
        ids = np.array([contestant.prompt(length, self._source)], dtype=np.int64)
        return self._pipe.add_request(self._num_requests, openvino.Tensor(ids), config)

    @staticmethod
    def _read(handle) -> bool:
        if not handle.can_read():
            return False
        handle.read()
        return True


if __name__ == "__main__":
    asked = contestant.arguments()
    contestant.serve(lambda: OpenVino(asked))
