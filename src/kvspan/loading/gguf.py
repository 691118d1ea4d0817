"""Checkpoints as GGUF files, seen as if they were Hugging Face ones. Knows no model's code.

Translates the metadata to a `config.json`, the tensors' names to Hugging Face's, and undoes what the
converter of llama.cpp did to values. Quantised values become bfloat16 as they are read.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from kvspan.errors import ModelError
from kvspan.loading.gguf_file import GgufFile, StoredTensor, read_gguf
from kvspan.loading.gguf_tokenizer import end_token_ids
from kvspan.topology import Span

_ROPE_DIVISORS = "rope_freqs.weight"

_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_NAMES_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_VALUES_AT_ONCE = 1 << 22
"""Values dequantised at a time: float32 on the way to bfloat16, which needs room."""


@dataclass(frozen=True, slots=True)
class _Architecture:
    """How llama.cpp's name for a kind of model is read.

    Args:
        hf_class: Hugging Face's name for it.
        pairs_are_neighbours: rows of q and k were reordered so that the two elements that rotary
            embedding turns together lie side by side, instead of half a head apart.
    """

    hf_class: str
    pairs_are_neighbours: bool


_ARCHITECTURES = {
    "llama": _Architecture("LlamaForCausalLM", pairs_are_neighbours=True),
    "qwen2": _Architecture("Qwen2ForCausalLM", pairs_are_neighbours=False),
    "qwen3": _Architecture("Qwen3ForCausalLM", pairs_are_neighbours=False),
}


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor of a GGUF file.

    Args:
        name: its Hugging Face name.
        where: the file.
        stored: where it lies.
        num_heads: of a tensor whose rows were reordered inside each head; None for any other.
    """

    name: str
    where: str
    stored: StoredTensor
    num_heads: int | None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole tensor."""
        return self.stored.shape

    def read(self, take: Sequence[Span]) -> Tensor:
        """Reads one part; see `LazyTensor.read`. Of a row only the blocks that it touches are read."""
        dtype = _DTYPES.get(self.stored.kind, torch.bfloat16)
        if not all(span.size for span in take):
            return torch.empty([span.size for span in take], dtype=dtype)
        blocks = self.stored.blocks
        if len(take) == 1:  # a vector is short: reordered, its parts are not whole blocks
            return _unpack(blocks, self.stored.kind)[self._rows(take[0])]
        rows, *inner, columns = take
        size = self.stored.block_values
        first, last = columns.start // size, -(-columns.stop // size)
        part = blocks[self._rows(rows), *(slice(s.start, s.stop) for s in inner), first:last]
        start = columns.start - first * size
        return _unpack(part, self.stored.kind)[..., start : start + columns.size]

    def _rows(self, span: Span) -> slice | npt.NDArray[np.int64]:
        """Where rows [start, stop) lie in the file.

        Row (head, half, i) of Hugging Face is row (head, i, half) of llama.cpp.
        """
        if self.num_heads is None:
            return slice(span.start, span.stop)
        head_dim = self.shape[0] // self.num_heads
        head, place = np.divmod(np.arange(span.start, span.stop), head_dim)
        half, i = np.divmod(place, head_dim // 2)
        return np.asarray(head * head_dim + 2 * i + half, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class GgufCheckpoint:
    """A GGUF file as a checkpoint.

    Args:
        raw_config: its metadata, as a `config.json` would say it.
        where: the file.
        file: what it holds.
    """

    raw_config: Mapping[str, Any]
    where: str
    file: GgufFile

    def tensors(self, _wanted: Mapping[str, tuple[int, ...]], /) -> Iterator[GgufTensor]:
        """All tensors under their Hugging Face names; one that has none keeps its own."""
        architecture = _ARCHITECTURES[self.file.metadata["general.architecture"]]
        heads = {
            "q_proj": self.raw_config["num_attention_heads"],
            "k_proj": self.raw_config["num_key_value_heads"],
        }
        for stored in self.file.tensors:
            if stored.name == _ROPE_DIVISORS:
                continue
            name = _hf_name(stored.name)
            projection = name.split(".")[-2] if "." in name else ""
            num_heads = heads.get(projection) if architecture.pairs_are_neighbours else None
            yield GgufTensor(name, self.where, stored, num_heads)


def open_gguf(path: Path) -> GgufCheckpoint:
    """Opens a GGUF file.

    Args:
        path: the file; it must be whole, not split.

    Raises:
        ModelError: it is broken, of an unknown architecture, or packed in an unknown way.
    """
    file = read_gguf(path)
    if (parts := file.metadata.get("split.count", 1)) > 1:
        raise ModelError(
            f"{path} is one of {parts} parts; join them with `llama-gguf-split --merge` first."
        )
    _check_kinds(file)
    return GgufCheckpoint(_translate_config(file), str(path), file)


def _check_kinds(file: GgufFile) -> None:
    """Refuses a file with values that nobody can unpack, before any are needed."""
    for kind, stored in {stored.kind: stored for stored in file.tensors}.items():
        try:
            _unpack(stored.blocks.reshape(-1, 1, stored.blocks.shape[-1])[:1], kind)
        except NotImplementedError:
            raise ModelError(
                f"{file.where}: the tensor {stored.name} is of the quantisation type {kind.name}, "
                "which cannot be unpacked; use a file of another type, e.g. Q8_0."
            ) from None


def _hf_name(name: str) -> str:
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if match and match[2] in _NAMES_IN_LAYER:
        return f"model.layers.{match[1]}.{_NAMES_IN_LAYER[match[2]]}.{match[3]}"
    return _NAMES.get(name, name)


def _translate_config(file: GgufFile) -> dict[str, Any]:
    """The metadata as a Hugging Face config."""
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
        "rope_scaling": _translate_rope(read, stored.get(_ROPE_DIVISORS), head_dim),
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
        has = f" beside {_ROPE_DIVISORS}" if kind == "linear" else " (has none, linear)"
        raise ModelError(f'{read.where}: unknown rope scaling type "{kind}"{has}.')
    if divisors is not None:
        if divisors.shape != (head_dim // 2,):
            raise ModelError(
                f"{read.where}: {_ROPE_DIVISORS} has shape {list(divisors.shape)}, and a head's "
                f"{head_dim} elements have {head_dim // 2} frequencies."
            )
        return {"rope_type": "divisors", "divisors": _unpack(divisors.blocks, divisors.kind).tolist()}
    if kind == "linear":
        return {"rope_type": "linear", "factor": read.number("rope.scaling.factor")}
    return None


class _Metadata:
    """Reads an architecture's keys and names the file and the key when one is not as it must be."""

    def __init__(self, file: GgufFile) -> None:
        self.where = file.where
        self._metadata = file.metadata
        self._prefix = str(file.metadata.get("general.architecture"))
        if self._prefix not in _ARCHITECTURES:
            has = ", ".join(_ARCHITECTURES)
            raise ModelError(f'{self.where}: unknown architecture "{self._prefix}" (has {has}).')
        self.architecture = _ARCHITECTURES[self._prefix]

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


_DTYPES = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
}
"""Kinds that are not quantised; a value is a block of its own."""


def _unpack(blocks: npt.NDArray[np.uint8], kind: GGMLQuantizationType) -> Tensor:
    """[..., blocks of a row, bytes of a block] uint8 -> [..., values of a row]."""
    packed = np.array(blocks).reshape(*blocks.shape[:-2], -1)  # a copy: torch needs one it may write to
    if kind in _DTYPES:
        return torch.from_numpy(packed).view(_DTYPES[kind])
    rows = packed.reshape(-1, packed.shape[-1])
    num_chunks = -(-blocks.size // _VALUES_AT_ONCE) or 1
    values = [
        torch.from_numpy(dequantize(chunk, kind)).bfloat16()
        for chunk in np.array_split(rows, num_chunks)
    ]
    return torch.cat(values).reshape(*packed.shape[:-1], -1)
