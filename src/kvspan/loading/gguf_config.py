"""The metadata of a GGUF file as a Hugging Face config. Knows no values of weights; loads no torch."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from gguf.quants import dequantize

from kvspan.errors import ModelError
from kvspan.loading.gguf_file import GgufFile, StoredTensor
from kvspan.loading.gguf_tokenizer import end_token_ids

ROPE_DIVISORS = "rope_freqs.weight"
"""A tensor that is no weight: what rotary frequencies are divided by."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """How llama.cpp's name for a kind of model is read.

    Args:
        hf_class: Hugging Face's name for it.
        pairs_are_neighbours: rows of q and k were reordered so that the two elements that rotary
            embedding turns together lie side by side, instead of half a head apart.
    """

    hf_class: str
    pairs_are_neighbours: bool


ARCHITECTURES = {
    "llama": Architecture("LlamaForCausalLM", pairs_are_neighbours=True),
    "qwen2": Architecture("Qwen2ForCausalLM", pairs_are_neighbours=False),
    "qwen3": Architecture("Qwen3ForCausalLM", pairs_are_neighbours=False),
}


def translate_config(file: GgufFile) -> dict[str, Any]:
    """The metadata as a Hugging Face config.

    Raises:
        ModelError: the file is one part of several, of an unknown architecture, or lacks a key.
    """
    if (parts := file.metadata.get("split.count", 1)) > 1:
        raise ModelError(
            f"{file.where} is one of {parts} parts; join them with `llama-gguf-split --merge` first."
        )
    read = _Metadata(file)
    stored = {tensor.name: tensor for tensor in file.tensors}
    if "token_embd.weight" not in stored:
        raise ModelError(f"{file.where} has no tensor token_embd.weight.")
    num_heads, hidden_size = read.number("attention.head_count"), read.number("embedding_length")
    head_dim = read.number("attention.key_length", default=hidden_size // max(num_heads, 1))
    if (rotated := read.number("rope.dimension_count", default=head_dim)) != head_dim:
        raise ModelError(
            f"{file.where}: rotary embedding of {rotated} of a head's {head_dim} elements is not "
            "there yet."
        )
    return {
        "architectures": [read.architecture.hf_class],
        "hidden_size": hidden_size,
        "intermediate_size": read.number("feed_forward_length"),
        "num_hidden_layers": read.number("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": read.number("attention.head_count_kv", default=num_heads),
        "head_dim": head_dim,
        "vocab_size": stored["token_embd.weight"].shape[0],
        "max_position_embeddings": read.number("context_length"),
        "rms_norm_eps": read.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": read.number("rope.freq_base", default=10000.0),
        "rope_scaling": _translate_rope(read, stored.get(ROPE_DIVISORS), head_dim),
        "hidden_act": "silu",
        "attention_bias": "blk.0.attn_q.bias" in stored,
        "mlp_bias": "blk.0.ffn_gate.bias" in stored,
        "tie_word_embeddings": "output.weight" not in stored,
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": end_token_ids(file.metadata),
        "torch_dtype": "bfloat16",
    }


def _translate_rope(
    read: "_Metadata", divisors: StoredTensor | None, head_dim: int
) -> dict[str, Any] | None:
    """Scaling of rotary frequencies as `config.model` reads it."""
    kind = read.text("rope.scaling.type", default="none")
    if kind not in ("none", "linear") or (kind == "linear" and divisors is not None):
        has = f" beside {ROPE_DIVISORS}" if kind == "linear" else " (has none, linear)"
        raise ModelError(f'{read.where}: unknown rope scaling type "{kind}"{has}.')
    if divisors is not None:
        if divisors.shape != (head_dim // 2,):
            raise ModelError(
                f"{read.where}: {ROPE_DIVISORS} has shape {list(divisors.shape)}, and a head's "
                f"{head_dim} elements have {head_dim // 2} frequencies."
            )
        values = dequantize(np.array(divisors.blocks).reshape(1, -1), divisors.kind)
        return {"rope_type": "divisors", "divisors": values.ravel().tolist()}
    if kind == "linear":
        return {"rope_type": "linear", "factor": read.number("rope.scaling.factor")}
    return None


class _Metadata:
    """Reads an architecture's keys and names the file and the key when one is not as it must be."""

    def __init__(self, file: GgufFile) -> None:
        self.where = file.where
        self._metadata = file.metadata
        self._prefix = str(file.metadata.get("general.architecture"))
        if self._prefix not in ARCHITECTURES:
            has = ", ".join(ARCHITECTURES)
            raise ModelError(f'{self.where}: unknown architecture "{self._prefix}" (has {has}).')
        self.architecture = ARCHITECTURES[self._prefix]

    def number(self, key: str, *, default: float | None = None) -> Any:
        """A number; a missing one without `default` is an error."""
        return self._read(key, (int, float), default)

    def text(self, key: str, *, default: str) -> str:
        """A string."""
        return str(self._read(key, str, default))

    def _read(self, key: str, kinds: type | tuple[type, ...], default: float | str | None) -> Any:
        value = self._metadata.get(f"{self._prefix}.{key}", default)
        if not isinstance(value, kinds):
            what = "is missing" if value is None else f"has the unexpected value {value!r}"
            raise ModelError(f'{self.where}: the key "{self._prefix}.{key}" {what}.')
        return value
