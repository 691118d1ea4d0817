"""The tokenizer that a GGUF file carries, rebuilt. Knows no tensors.

The file has tokens, their kinds and merges; how text is cut before merging is only named. The cuts are
those of the `tokenizer.json` of SmolLM2, Llama 3, Qwen2 and GPT-2.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from kvspan.errors import ModelError


class _TokenKind(IntEnum):
    """`tokenizer.ggml.token_type`, as far as it matters."""

    CONTROL = 3
    USER_DEFINED = 4


_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _split_by(pattern: str) -> Any:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _split_digits() -> Any:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cut:
    """How text is cut before merging.

    Args:
        make: makes the pre-tokenizer.
        whole_words_first: a cut that is a token needs no merges to become one.
        nfc: text is composed (Unicode NFC) first.
        adds_bos: texts begin with BOS, unless the file says otherwise.
    """

    make: Callable[[], Any]
    whole_words_first: bool = False
    nfc: bool = False
    adds_bos: bool = False


_LLAMA3 = _Cut(
    make=lambda: _split_by(rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}"),
    whole_words_first=True,
    adds_bos=True,
)
_QWEN2 = _Cut(make=lambda: _split_by(rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}"), nfc=True)
_GPT2 = _Cut(make=lambda: pre_tokenizers.ByteLevel(add_prefix_space=False))

_CUTS = {
    "smollm": _Cut(make=_split_digits),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "qwen2": _QWEN2,
    "gpt-2": _GPT2,
    "default": _GPT2,
}


def has_tokenizer(metadata: Mapping[str, Any]) -> bool:
    """Whether a GGUF file carries a tokenizer."""
    return metadata.get("tokenizer.ggml.model", "none") not in ("none", "no_vocab")


def adds_bos(metadata: Mapping[str, Any]) -> bool:
    """Whether texts begin with BOS."""
    cut = _CUTS.get(metadata.get("tokenizer.ggml.pre", "default"))
    return bool(metadata.get("tokenizer.ggml.add_bos_token", cut is not None and cut.adds_bos))


def end_token_ids(metadata: Mapping[str, Any]) -> list[int]:
    """Tokens that end a text or a turn of it."""
    keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
    return list(dict.fromkeys(metadata[key] for key in keys if key in metadata))


def build_tokenizer(metadata: Mapping[str, Any], *, where: str) -> Tokenizer:
    """Rebuilds the tokenizer of a GGUF file.

    Args:
        metadata: the file's.
        where: the file, for errors.

    Raises:
        ModelError: it is of a kind that kvspan cannot rebuild.
    """
    if (model := metadata["tokenizer.ggml.model"]) != "gpt2":
        raise ModelError(
            f'{where}: cannot rebuild a tokenizer of the kind "{model}" (has gpt2, byte-level BPE): '
            "use the model's Hugging Face directory, which has a tokenizer.json."
        )
    name = metadata.get("tokenizer.ggml.pre", "default")
    if name not in _CUTS:
        raise ModelError(f'{where}: unknown pre-tokenizer "{name}" (has {", ".join(_CUTS)}).')
    cut = _CUTS[name]
    tokens, kinds, merges = (_list(metadata, key, where) for key in ("tokens", "token_type", "merges"))
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=[_pair(merge) for merge in merges],
            ignore_merges=cut.whole_words_first,
        )
    )
    if cut.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = cut.make()
    tokenizer.decoder = decoders.ByteLevel()
    added = [  # found in text before it is cut; only control tokens are left out of decoded text
        AddedToken(token, special=kind == _TokenKind.CONTROL, normalized=False)
        for token, kind in zip(tokens, kinds, strict=True)
        if kind in (_TokenKind.CONTROL, _TokenKind.USER_DEFINED)
    ]
    tokenizer.add_tokens(added)
    return tokenizer


def _list(metadata: Mapping[str, Any], key: str, where: str) -> list[Any]:
    value = metadata.get(f"tokenizer.ggml.{key}")
    if not isinstance(value, list):
        raise ModelError(f'{where}: the key "tokenizer.ggml.{key}" is missing or no list.')
    return value


def _pair(merge: str) -> tuple[str, str]:
    # A merge is written "left right"; byte-level tokens never contain a space themselves.
    left, _, right = merge.partition(" ")
    return left, right
