"""Checkpoints as GGUF files, seen as if they were Hugging Face ones. Knows no model's code.

Translates the tensors' names to Hugging Face's, and undoes what the converter of llama.cpp did to
values. Quantised values become bfloat16 as they are read. The metadata is `gguf_config`'s affair.
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
from kvspan.loading.gguf_config import ARCHITECTURES, ROPE_DIVISORS, translate_config
from kvspan.loading.gguf_file import GgufFile, StoredTensor, read_gguf
from kvspan.topology import Span

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
        architecture = ARCHITECTURES[self.file.metadata["general.architecture"]]
        heads = {
            "q_proj": self.raw_config["num_attention_heads"],
            "k_proj": self.raw_config["num_key_value_heads"],
        }
        for stored in self.file.tensors:
            if stored.name == ROPE_DIVISORS:
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
    _check_kinds(file)
    return GgufCheckpoint(translate_config(file), str(path), file)


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
