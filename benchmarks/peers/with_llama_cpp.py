"""llama.cpp as a contestant: what its `llama-batched-bench -fa on -pps` does, through its C interface.

One prompt is prefilled and copied to every sequence's own stream; then random tokens are decoded, and
nobody samples or detokenises.
"""

import ctypes
import random

import contestant
import llama_cpp

_BATCH_TOKENS = 2048


class LlamaCpp:
    """A model, and a context for each case."""

    def __init__(self, asked: contestant.argparse.Namespace) -> None:
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(
            asked.model.encode(), llama_cpp.llama_model_default_params()
        )
        self._asked, self._source = asked, random.Random(0)
        self._batch = llama_cpp.llama_batch_init(_BATCH_TOKENS, 0, 1)
        self._context, self._length, self._num_seqs = None, 0, 0

    def prepare(self, context: int, batch: int) -> None:
        """See `Contestant.prepare`."""
        self._open(batch, context + self._asked.new_tokens)
        self._read(context)
        memory = llama_cpp.llama_get_memory(self._context)
        for sequence in range(1, batch):
            llama_cpp.llama_memory_seq_cp(memory, 0, sequence, -1, -1)
        self._length, self._num_seqs = context, batch
        for _ in range(contestant.WARM_TOKENS):
            self.step()

    def step(self) -> None:
        """See `Contestant.step`."""
        self._decode([(s, self._length) for s in range(self._num_seqs)], with_logits=True)
        self._length += 1

    def drop(self) -> None:
        """See `Contestant.drop`."""
        llama_cpp.llama_free(self._context)

    def prefill(self, tokens: int) -> None:
        """See `Contestant.prefill`."""
        self._open(1, tokens)
        self._read(tokens)
        self.drop()

    def _open(self, batch: int, length: int) -> None:
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = length * batch
        params.n_seq_max = batch
        params.n_batch = _BATCH_TOKENS
        params.n_threads = params.n_threads_batch = self._asked.threads
        params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
        params.kv_unified = False
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        assert self._context, "llama.cpp refuses the context"

    def _read(self, length: int) -> None:
        for start in range(0, length, _BATCH_TOKENS):
            positions = range(start, min(start + _BATCH_TOKENS, length))
            self._decode([(0, position) for position in positions], with_logits=False)

    def _decode(self, places: list[tuple[int, int]], *, with_logits: bool) -> None:
        """Runs a random token at each (sequence, position)."""
        batch = self._batch
        batch.n_tokens = len(places)
        tokens = contestant.prompt(len(places), self._source)
        for i, ((sequence, position), token) in enumerate(zip(places, tokens, strict=True)):
            batch.token[i], batch.pos[i] = token, position
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
            batch.logits[i] = with_logits or i == len(places) - 1
        failed = llama_cpp.llama_decode(self._context, batch)
        assert not failed, f"llama_decode says {failed}"
        ctypes.cast(llama_cpp.llama_get_logits(self._context), ctypes.c_void_p)  # waits for the result


if __name__ == "__main__":
    asked = contestant.arguments()
    contestant.serve(lambda: LlamaCpp(asked))
