"""The tokenizer of a `tiktoken.model`, rebuilt from its ranks; no code of the checkpoint is run.

The file has a token a line, base64, and its rank: tiktoken merges the neighbours that together have the
lowest rank. Each way to make a token of two others is a merge of that rank, so the merges of an ordinary
BPE follow. What the file does not say is how text is cut before merging, and which special tokens there
are: the latter are in `tokenizer_config.json`; the former is code of the checkpoint, and known here for
Kimi (`tokenization_kimi.py`). Others are cut as cl100k_base cuts (GPT-4, Llama 3, the first Qwen).
"""

import base64
import binascii
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from kvspan.errors import ModelError
from kvspan.loading.byte_level import as_letters

FILE_NAME = "tiktoken.model"

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_OPENING = r"[^\r\n\p{L}\p{N}]?"


@dataclass(frozen=True, slots=True)
class _Kind:
    """What the code of a checkpoint says beside its vocabulary.

    Args:
        cut: pattern of the pieces that are merged each by itself.
        num_reserved: ids after the vocabulary that are special tokens, with or without a name.
    """

    cut: str
    num_reserved: int


_KIMI = _Kind(
    rf"[\p{{Han}}]+"
    rf"|{_OPENING}{_UPPER}*{_LOWER}+{_CONTRACTIONS}?"
    rf"|{_OPENING}{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    rf"|{_REST}",
    num_reserved=256,
)
_DEFAULT = _Kind(rf"{_CONTRACTIONS}|{_OPENING}\p{{L}}+|{_REST}", num_reserved=0)


def build_tokenizer(directory: Path, config: Mapping[str, Any]) -> Tokenizer:
    """Rebuilds the tokenizer of a directory with a `tiktoken.model`.

    Args:
        directory: of the model.
        config: its `tokenizer_config.json`.

    Raises:
        ModelError: the file is not what it should be.
    """
    ranks = read_ranks(directory / FILE_NAME)
    kind = _KIMI if _is_kimi(config) else _DEFAULT
    vocab = {as_letters(token): rank for token, rank in ranks.items()}
    special = _special_tokens(config, len(ranks), kind)
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocab | {str(token): i for i, token in special.items()},
            merges=[(as_letters(left), as_letters(right)) for left, right in _merges(ranks)],
            ignore_merges=True,  # tiktoken takes a piece that is a token as it is
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(kind.cut), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([token for _, token in sorted(special.items())])
    return tokenizer


def read_ranks(path: Path) -> dict[bytes, int]:
    """Token -> rank, which is its id.

    Raises:
        ModelError: a line is broken, or a byte has no token: it could not be written then.
    """
    ranks = {}
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            raise ModelError(f"{path}, line {number}: no token in base64 and its rank.") from None
    if missing := sum(bytes([byte]) not in ranks for byte in range(256)):
        raise ModelError(f"{path}: {missing} of the 256 bytes have no token.")
    return ranks


def _merges(ranks: Mapping[bytes, int]) -> Iterator[tuple[bytes, bytes]]:
    """Every pair of tokens that make a token, in the order in which they merge."""
    for token in sorted(ranks, key=ranks.__getitem__):
        pairs = [(token[:i], token[i:]) for i in range(1, len(token))]
        known = [(a, b) for a, b in pairs if a in ranks and b in ranks]
        yield from sorted(known, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))


def _special_tokens(config: Mapping[str, Any], first: int, kind: _Kind) -> dict[int, AddedToken]:
    """Id -> special token: those with a name, and those that are reserved."""
    named = {int(i): traits for i, traits in config.get("added_tokens_decoder", {}).items()}
    ids = sorted({*named, *range(first, first + kind.num_reserved)})
    return {i: _added(named.get(i, {"content": f"<|reserved_token_{i}|>"})) for i in ids}


def _added(traits: Mapping[str, Any]) -> AddedToken:
    return AddedToken(str(traits["content"]), special=traits.get("special", True), normalized=False)


def _is_kimi(config: Mapping[str, Any]) -> bool:
    """Whether the tokenizer's code is Kimi's, by the name that the config calls it by."""
    return "tokenization_kimi" in str(config.get("auto_map", ""))
